"""The samples of a site as batches, ready for a network on a device."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedshift.data.domain import Dense, Domain, Inputs, Preprocessing, Rows, SparseRows
from fedshift.data.transforms import Augmentation, to_network, to_unit, training_inputs
from fedshift.errors import FedshiftError, UserError
from fedshift.functional.differential_privacy import sample_rate
from fedshift.functional.secret_noise import Source, uniform

Batch = tuple[Tensor, Tensor, Tensor]
"""Inputs, labels (class numbers or masks) and domain numbers."""
_Scale = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]
Restyle = Callable[[Tensor, Tensor, torch.Generator], Tensor]
"""Changes samples: takes them as stored (images in [0, 1]), their rows and a generator; returns the changed ones."""


class SiteData:
    """The chosen rows of one or more domains, one domain after the other, numbered 0 … samples - 1.

    Args:
        parts: (domain, its rows, its number) each. A site has one part, the pool has one per source.
        preprocessing: how stored inputs become what the network reads.
        augmentation: random changes of training images; None: none.
        device: where batches are wanted.
        cache_bytes: if nothing is augmented and all samples take at most this many bytes as float32, they are converted
            once and kept on the device. Otherwise each batch is read from the stored arrays and converted.

    Raises:
        UserError: there are no rows.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Domain, Rows, int]],
        preprocessing: Preprocessing,
        augmentation: Augmentation | None = None,
        device: torch.device | str = "cpu",
        *,
        cache_bytes: int = 512 << 20,
    ) -> None:
        kept = [(domain, np.asarray(rows, dtype=np.int64), number) for domain, rows, number in parts if len(rows)]
        if not kept:
            raise UserError(f"no samples in {', '.join(domain.name for domain, _, _ in parts) or 'any domain'}")
        self.preprocessing, self._scales = _scales_of([domain for domain, _, _ in kept], preprocessing)
        self.augmentation = augmentation or Augmentation()
        self.device = torch.device(device)
        self._inputs: list[Inputs] = [domain.inputs for domain, _, _ in kept]
        self._rows = np.concatenate([rows for _, rows, _ in kept])
        self._part = np.repeat(np.arange(len(kept)), [len(rows) for _, rows, _ in kept])
        self._groups = [domain.groups[rows] for domain, rows, _ in kept if domain.groups is not None]
        self._masks = [domain.masks for domain, _, _ in kept if domain.masks is not None]
        labels = np.concatenate([domain.labels[rows] for domain, rows, _ in kept])
        numbers = np.repeat([number for _, _, number in kept], [len(rows) for _, rows, _ in kept])
        self.labels = torch.from_numpy(labels).to(self.device)
        self.domain_numbers = torch.from_numpy(numbers.astype(np.int64)).to(self.device)
        self.input_shape = tuple(self._inputs[0].shape[1:])
        self._unchanged = self.augmentation.is_identity or len(self.input_shape) != 3
        self._cacheable = 4 * self.samples * int(np.prod(self.input_shape)) <= cache_bytes
        self._cache: Tensor | None = None
        self.seen: Tensor | None = None
        """Which samples were read since `watch` was called; None before."""
        self.read: list[Tensor] = []
        """Their rows, as they were read last; the newest at the end."""
        self._restyle: Restyle | None = None
        self._ahead: tuple[Tensor, Tensor] | None = None

    def with_restyle(self, restyle: Restyle) -> SiteData:
        """The same samples, changed by ``restyle`` whenever they are drawn for training, before augmentation."""
        other = copy.copy(self)
        other._restyle = restyle
        return other

    @property
    def samples(self) -> int:
        """How many samples the site holds."""
        return len(self._rows)

    @cached_property
    def groups(self) -> Tensor | None:
        """(n,) int64 numbers 0, 1, … of the samples' groups; None unless all samples are in groups."""
        if sum(map(len, self._groups)) < self.samples:
            return None
        return torch.from_numpy(np.unique(np.concatenate(self._groups), return_inverse=True)[1].reshape(-1))

    @property
    def deterministic(self) -> bool:
        """Whether a row always gives the same input, because nothing is augmented."""
        return self._restyle is None and self._unchanged and self.preprocessing.patch is None

    def batch(self, rows: Tensor, generator: torch.Generator | None = None) -> Batch:
        """A batch on the device.

        Args:
            rows: int64 (b,).
            generator: draws the augmentation, on the CPU; None: no augmentation.

        Returns:
            Inputs (b, …) float32, or int64 tokens, labels (b,) int64 and domain numbers (b,) int64. For segmentation
            the labels are masks (b, structures, …) float32, augmented together with their images. Of volumes that are
            read in parts (`Preprocessing.patch`) a part is drawn of each.
        """
        position = rows.to(self.device)
        self._note(rows)
        labels, numbers = self.labels.index_select(0, position), self.domain_numbers.index_select(0, position)
        masks = self._gather(rows.cpu().numpy(), self._masks).to(self.device).float() if self._masks else None
        if generator is None or self.deterministic:
            inputs = self._plain(rows, position)
        else:
            stored = self._raw(rows)
            images = to_unit(stored, self.device)
            if self._restyle is not None:
                images = self._restyle(images, rows, generator)
            inputs, masks = training_inputs(images, masks, self.preprocessing, self.augmentation, generator)
        return inputs, labels if masks is None else masks, numbers

    def read_ahead(self, orders: Iterable[Tensor], threads: int) -> Iterator[Tensor]:
        """The same mini-batches' rows, while threads read the samples of the next ones.

        ``threads``: 0: nothing is read ahead, nor where all samples are kept on the device.
        """
        if not threads or (self._cacheable and self.deterministic):
            yield from orders
            return
        waiting: deque[tuple[Tensor, Future[Tensor]]] = deque()
        with ThreadPoolExecutor(threads) as pool:
            try:
                for rows in orders:
                    waiting.append((rows, pool.submit(self._gather, rows.numpy(), self._inputs, self._scales)))
                    if len(waiting) > threads:
                        yield self._await(*waiting.popleft())
                while waiting:
                    yield self._await(*waiting.popleft())
            finally:
                self._ahead = None
                pool.shutdown(cancel_futures=True)

    def _await(self, rows: Tensor, read: Future[Tensor]) -> Tensor:
        self._ahead = rows, read.result()
        return rows

    def _raw(self, rows: Tensor) -> Tensor:
        """The given rows as stored, on the CPU."""
        if self._ahead is not None and self._ahead[0] is rows:
            return self._ahead[1]
        return self._gather(rows.cpu().numpy(), self._inputs, self._scales)

    def stored_rows(self, rows: Tensor) -> Tensor:
        """The given rows before normalisation, on the device: images have values in [0, 1]."""
        self._note(rows)
        return to_unit(self._raw(rows), self.device)

    def forget(self) -> None:
        """Free the samples that were converted. The next batch converts them again, to the same bits."""
        self._cache = None

    def watch(self) -> None:
        """From now on, `seen` and `read` record which samples are read."""
        self.seen = torch.zeros(self.samples, dtype=torch.bool)
        self.read = []

    def _note(self, rows: Tensor) -> None:
        if self.seen is not None:
            self.seen[rows.cpu()] = True
            self.read.append(rows.cpu())
            del self.read[:-4]

    def all_batches(self, size: int, order: Tensor | None = None) -> Iterator[Batch]:
        """Every sample once, in their order or in that of ``order``, without augmentation, ``size`` at a time."""
        rows = torch.arange(self.samples) if order is None else order
        for begin in range(0, self.samples, size):
            yield self.batch(rows[begin : begin + size])

    def _plain(self, rows: Tensor, device_rows: Tensor) -> Tensor:
        # No cache for augmented data: only the few reads without augmentation could use it.
        if not (self._cacheable and self.deterministic):
            stored = self._raw(rows)
            return to_network(stored, self.preprocessing, self.device)
        if self._cache is None:
            self._cache = self._convert_all()
        chosen = self._cache.index_select(0, device_rows)
        # The cache is (n, h, w, c): rows are selected in that layout, so the permuted view is channels-last, no copy.
        return chosen.permute(0, 3, 1, 2) if chosen.dim() == 4 else chosen

    def _convert_all(self) -> Tensor:
        channels_last = len(self.input_shape) == 3
        shape = (*self.input_shape[1:], self.input_shape[0]) if channels_last else self.input_shape
        tokens = self.preprocessing.kind == "tokens"
        kind = torch.int64 if tokens else torch.float32
        out = torch.empty((self.samples, *shape), dtype=kind, device=self.device)
        for begin in range(0, self.samples, 1024):
            rows = np.arange(begin, min(begin + 1024, self.samples))
            values = to_network(self._gather(rows, self._inputs, self._scales), self.preprocessing, self.device)
            out[begin : begin + len(rows)] = values.permute(0, 2, 3, 1) if channels_last else values
        return out

    def _gather(self, rows: npt.NDArray[np.int64], stored: Sequence[Inputs], scales: Sequence[_Scale] = ()) -> Tensor:
        """The given rows of the stored inputs or masks, as one tensor on the CPU."""
        if len(stored) == 1:
            return torch.from_numpy(_take(stored[0], self._rows[rows]))
        parts = self._part[rows]
        first = stored[0]
        dtype = np.float32 if isinstance(first, SparseRows) else first.dtype
        out = np.empty((len(rows), *first.shape[1:]), dtype=dtype)
        for part in np.unique(parts):
            chosen = parts == part
            out[chosen] = _take(stored[part], self._rows[rows[chosen]])
            if scales:
                mean, std = scales[part]
                out[chosen] = (out[chosen] - mean) / std
        return torch.from_numpy(out)


def _scales_of(domains: Sequence[Domain], preprocessing: Preprocessing) -> tuple[Preprocessing, list[_Scale]]:
    """The preprocessing of these domains' samples, and the scale of each where a pool has several scales."""
    if preprocessing.standardise is None:
        return preprocessing, []
    scales = [domain.scale for domain in domains if domain.scale is not None]
    if len(scales) < len(domains):
        raise FedshiftError("data that are standardised per site have no scale")
    if len(domains) == 1:
        return preprocessing.at(scales[0]), []
    check_pooled_scales(preprocessing)
    numbers = [(np.array(mean, dtype=np.float32), np.array(std, dtype=np.float32)) for mean, std in scales]
    return preprocessing.model_copy(update={"standardise": None}), numbers


def check_pooled_scales(preprocessing: Preprocessing) -> None:
    """Raise UserError where a pool holds samples, other than vectors, in scales of their sites."""
    if preprocessing.standardise is not None and len(preprocessing.shape or ()) != 1:
        raise UserError(
            "data.standardise: per_site scales images where they are, and this method pools them: leave it out of "
            "methods, or write true"
        )


def _take(inputs: Inputs, rows: npt.NDArray[np.int64]) -> Dense:
    """A copy of the given rows as a plain array."""
    if isinstance(inputs, SparseRows):
        return inputs.dense(rows)
    return inputs[rows]


def mixed_order(samples: int) -> Tensor:
    """An order of ``samples`` samples that mixes the classes of files that are sorted by class; always the same one."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(0))


def epoch_batches(
    samples: int, batch_size: int, generator: torch.Generator, chances: Tensor | None = None
) -> list[Tensor]:
    """All rows 0 … samples - 1 in random order, in batches of ``batch_size``.

    BatchNorm cannot train on one sample. So a last batch of one sample is joined to the one before it, and a site with
    a single sample gets a batch that holds it twice.

    ``batch_size``: rows in a batch; ``chances``: (samples,). If given, as many rows are drawn, each one independently
    with chances in this proportion.
    """
    if samples == 1:
        return [torch.zeros(2, dtype=torch.int64)]
    if chances is None:
        order = torch.randperm(samples, generator=generator)
    else:
        ends = chances.double().cumsum(0)
        drawn = torch.rand(samples, generator=generator, dtype=torch.float64) * ends[-1]
        order = torch.searchsorted(ends, drawn, right=True).clamp_max(samples - 1)
    batches = list(torch.split(order, batch_size))
    if batch_size > 1 and len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches


def poisson_batches(data: SiteData, batch_size: int, number: int, draws: Source) -> Iterator[Tensor]:
    """The rows of ``number`` mini-batches, each unit in each of them with probability q = B/N; a batch may be empty."""
    rate = sample_rate(data.samples, batch_size)
    units = data.samples if data.groups is None else int(data.groups.max()) + 1
    for _ in range(number):
        chosen = uniform(units, draws) < rate
        yield torch.nonzero(chosen if data.groups is None else chosen[data.groups]).flatten()


def class_chances(labels: Tensor, weights: Sequence[float] | None) -> Tensor:
    """In what proportion samples are drawn so that classes have these weights.

    Args:
        labels: (n,) class numbers.
        weights: of each class, for each of its samples; None: all classes are drawn equally often.

    Returns:
        (n,) float64.

    Example:
        >>> class_chances(torch.tensor([0, 0, 0, 1]), None)
        tensor([0.3333, 0.3333, 0.3333, 1.0000], dtype=torch.float64)
        >>> class_chances(torch.tensor([0, 0, 0, 1]), [1.0, 5.0])
        tensor([1., 1., 1., 5.], dtype=torch.float64)
    """
    numbers = labels.cpu()
    if weights is None:
        return (1 / numbers.bincount().double())[numbers]
    return torch.tensor(list(weights), dtype=torch.float64)[numbers]


def batches_per_epoch(samples: int, batch_size: int) -> int:
    """How many mini-batches `epoch_batches` makes."""
    full, rest = divmod(samples, batch_size)
    return max(1, full + (rest > 1))
