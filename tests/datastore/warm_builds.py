"""What is imported and compiled before the first child of `children` starts, so that a kill hits a build and no import.

It builds in a thread: what computes in parallel keeps threads for the one that asked for them, and lets go of them when
that one ends. The process that forks has none.
"""

import tempfile
import threading
from pathlib import Path

from byte_tokenizers import byte_tokenizer
from dense_models import save_model
from folders import write
from transformers.utils.logging import disable_progress_bar

from retrieve_spec.config import DenseConfig, StoreConfig
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.edit import compact_datastore, remove_documents
from retrieve_spec.datastore.inspection import verify_datastore


def _build() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "texts", {f"{i}.txt": f"{i} squared is {i * i}. " * 9 for i in range(3)})
        dense = DenseConfig(save_model(folder / "model"), dims=4, window=16, overlap=4)
        build_datastore(
            folder / "store", str(folder / "texts"), byte_tokenizer(), config=StoreConfig(dense=dense), workers=2
        )
        remove_documents(folder / "store", ["0.txt"])
        compact_datastore(folder / "store")
        verify_datastore(folder / "store")


disable_progress_bar()  # children share the lock of bars: one that is killed while it draws would keep it
_builder = threading.Thread(target=_build)
_builder.start()
_builder.join()
