"""The version of the project, also of the package's metadata and the image's tag."""

__version__ = "0.1.0"
