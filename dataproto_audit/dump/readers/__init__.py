"""Safe readers of the files that verl and other frameworks write: bytes in, plain batches out.

Nothing that a file supplies is executed, whatever its format. See SECURITY.md for what is read.
"""

from dataproto_audit.dump.readers.read import Folder, is_folder, read_batches, read_folder
from dataproto_audit.dump.readers.saved import Hint, Kind, Saved

__all__ = ["Folder", "Hint", "Kind", "Saved", "is_folder", "read_batches", "read_folder"]
