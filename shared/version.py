"""The version of the project. The package's metadata and the image's tag are this one."""

__version__ = "0.1.0"
