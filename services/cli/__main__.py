import sys

from shared.lasting import lasting

if __name__ == "__main__":
    try:
        with lasting():
            from services.cli.main import main

        sys.exit(main())
    except KeyboardInterrupt:  # while the modules are still being imported
        sys.exit(130)
