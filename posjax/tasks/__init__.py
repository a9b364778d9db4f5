"""Tasks, one file a family. Importing the package registers them all."""
from posjax.tasks import copy, retrieval  # noqa: F401
