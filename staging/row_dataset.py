"""A torch ``IterableDataset`` over published rows. torch is imported when one is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from inspect import signature
from typing import Any

from tokenplane.schemas.errors import ConfigError
from tokenplane.staging.open_store import open_store
from tokenplane.staging.row_dataset_batches import RowBatch, RowReader

TENSORS = (
    "groups",
    "offsets",
    "token_ids",
    "token_mask",
    "log_probs",
    "weight_versions",
    "prompt_lens",
    "rewards",
    "sample_mask",
    "attempts",
)
"""Fields of ``RowBatch`` that become tensors of the same dtype."""

_READER = signature(RowReader)


def row_dataset(url: str, consumer: str, **options: Any) -> Any:
    """A dataset whose items are batches: dictionaries of tensors (``TENSORS``) and of strings.

    Give it to ``DataLoader(dataset, batch_size=None)``. Each worker opens the store by itself, and
    claims share the rows out among workers and hosts. With a file store that this process has open
    too, workers must be started with ``multiprocessing_context="spawn"``.

    Nothing is acknowledged by itself, since a loader fetches ahead of the training: after a step
    call ``acknowledge(store, consumer, batch)`` in the trainer.

    Args:
        url: of the store.
        consumer: readers of one name share the rows out; readers of another get them all again.
        options: of ``RowReader``: ``max_rows`` and ``lease_s`` are needed.

    Raises:
        ConfigError: a needed option is not there, or one is unknown. Their values are judged by the
            first claim.
    """
    try:
        _READER.bind(None, consumer, **options)
    except TypeError as exc:
        raise ConfigError(
            f"options of the dataset: {exc}", expected=list(_READER.parameters)[2:]
        ) from exc
    return _dataset_class()(url, consumer, options)


def acknowledge(store: Any, consumer: str, batch: Mapping[str, Any]) -> int:
    """A batch of the dataset was trained on. Counts the rows that were not acknowledged before."""
    count: int = store.ack(batch["partition"], consumer, list(batch["row_ids"]))
    return count


def to_tensors(batch: RowBatch) -> dict[str, Any]:
    """The batch's arrays as tensors that share their memory, and its names."""
    import torch

    tensors: dict[str, Any] = {name: torch.from_numpy(getattr(batch, name)) for name in TENSORS}
    return tensors | {
        "row_ids": list(batch.row_ids),
        "group_ids": list(batch.group_ids),
        "expires_at_s": batch.expires_at_s,
    }


def jagged(batch: Mapping[str, Any], name: str) -> Any:
    """A token column as a nested tensor [B, jagged], a view of its values."""
    import torch

    return torch.nested.nested_tensor_from_jagged(batch[name], batch["offsets"])


@cache
def _dataset_class() -> Any:
    from torch.utils.data import IterableDataset

    class RowDataset(IterableDataset):  # type: ignore[misc] # torch is Any to the checker
        """See ``row_dataset``."""

        def __init__(self, url: str, consumer: str, options: Mapping[str, Any]) -> None:
            self._arguments = (url, consumer, dict(options))

        def __iter__(self) -> Iterator[dict[str, Any]]:
            url, consumer, options = self._arguments
            with open_store(url) as store:
                reader = RowReader(store, consumer, **options)
                for batch in reader:
                    yield to_tensors(batch) | {"partition": reader.partition}

        def __reduce__(self) -> tuple[Any, ...]:
            # The class is made when it is first needed: a worker makes its own.
            return (_make, self._arguments)

    return RowDataset


def _make(url: str, consumer: str, options: Mapping[str, Any]) -> Any:
    return row_dataset(url, consumer, **options)
