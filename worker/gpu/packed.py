"""A device buffer that each step refills with one packed copy from the host.

Its first words lie at fixed addresses, where captured graphs find them. Nothing here waits for the device,
except for a host buffer whose last copy has not ended (which a window of steps never meets).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from worker.gpu.staging import Slot, StagingRing

I32 = npt.NDArray[np.int32]


class PackedBuffer:
    """Owns the device buffer (int32) and the ring of pinned host buffers behind it."""

    def __init__(self, *, n_words: int, n_slots: int, device: torch.device) -> None:
        """`n_slots`: copies that may be in flight, plus one."""
        self.words = torch.zeros(n_words, dtype=torch.int32, device=device)
        self._device = device
        self._pinned: list[torch.Tensor] = []
        self._ring = StagingRing(n_slots=n_slots, make_buffer=lambda: self._pin(n_words))

    def take(self, n_words: int) -> Slot:
        """A host buffer of at least so many words."""
        if n_words <= len(self.words):
            return self._ring.take()
        # Rare: very many long prefixes at once.
        return Slot(np.zeros(n_words, dtype=np.int32))

    def send(self, slot: Slot, *, n_words: int, n_fixed: int) -> torch.Tensor:
        """Copy the first `n_words` on the current stream; the first `n_fixed` always come to lie in `words`.
        Returns the tensor that holds all of them."""
        host = torch.from_numpy(slot.buffer[:n_words])
        if n_words <= len(self.words):
            self.words[:n_words].copy_(host, non_blocking=True)
            whole = self.words
        else:
            whole = host.to(self._device)
            self.words[:n_fixed].copy_(whole[:n_fixed])
        event = torch.cuda.Event()
        event.record()
        slot.event = event
        return whole

    def _pin(self, n_words: int) -> I32:
        tensor = torch.zeros(n_words, dtype=torch.int32, pin_memory=True)
        self._pinned.append(tensor)
        view: I32 = tensor.numpy()
        return view
