"""What visits make of an arena's memory, kept for later ones."""

from __future__ import annotations

from collections.abc import Sequence

from roundpipe.runtime.weights.layer_weights import LayerWeights, Views


class KnownViews:
    """Parameters in an arena's memory that visits have made, for those that bring the same to the same place.

    Steps of one plan do, again and again.
    """

    def __init__(self) -> None:
        self._views: dict[tuple[int, LayerWeights, tuple[int, ...]], Views] = {}
        self._sizes: Sequence[int] = ()

    def at(self, start: int, weights: LayerWeights, indexes: tuple[int, ...]) -> Views:
        """Those of slots of a layer that lie one after the other."""
        return self._views.setdefault((start, weights, indexes), {})

    def keep_for(self, sizes_bytes: Sequence[int]) -> None:
        """Visits of these sizes follow: what others have made will hardly serve."""
        if sizes_bytes != self._sizes:
            self._views.clear()
            self._sizes = sizes_bytes

    def clear(self) -> None:
        self._views.clear()
