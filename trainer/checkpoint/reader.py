"""Reads torch's distributed checkpoints safely. Their file `.metadata` is a pickle, which could run code when it is
loaded; this module loads only harmless classes from it."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta


class MetadataError(ValueError):
    """Raised if the file `.metadata` of a checkpoint is damaged or hostile."""


class SafeMetadataReader(FileSystemReader):
    """A variant of torch's FileSystemReader that restricts the unpickling of `.metadata`. torch would load any class
    from this pickle. This reader allows only the classes of which a genuine `.metadata` consists, so that a hostile
    checkpoint cannot run code. (The tensors need no such protection, because torch reads them with weights_only.)"""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            metadata = MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
        except (pickle.UnpicklingError, EOFError, AttributeError) as error:
            raise MetadataError(f"{path}: {error}") from None
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class MetadataUnpickler(pickle.Unpickler):
    MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    NAMES = frozenset({("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"),
                       ("pathlib", "PosixPath"), ("pathlib", "Path"), ("pathlib._local", "PosixPath")})

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.NAMES:
            return super().find_class(module, name)
        if "." not in name:
            value = getattr(torch, name, None) if module == "torch" else None
            if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
                return value
            # only classes defined in these modules, not names that they import
            cls = super().find_class(module, name) if module in self.MODULES else None
            if isinstance(cls, type) and cls.__module__ == module:
                return cls
        raise pickle.UnpicklingError(f"the checkpoint's .metadata names {module}.{name}, which none of this trainer's "
                                     f"does")
