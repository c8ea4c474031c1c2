"""What a wrapper tells of itself: its workers, layers and stages, memory, timelines and reports."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from roundpipe.core.checks import check_flag
from roundpipe.core.contexts import contextmanager
from roundpipe.core.layers import OwnLoss
from roundpipe.reports.timeline import Timeline, check_path
from roundpipe.runtime.config import resolve
from roundpipe.wrappers.calls import ChainRunner
from roundpipe.wrappers.model_view import ModelView
from roundpipe.wrappers.run_report import RunReport, make_report
from roundpipe.wrappers.session import Runner


class ModelReports(ModelView):
    """A wrapper, and what can be asked about its runs."""

    _runner: Runner

    @property
    def num_workers(self) -> int:
        """How many entries the rotation has."""
        return self._session.engine.num_workers

    @property
    def worker_devices(self) -> tuple[torch.device, ...]:
        """The device of each worker, in the order of the rotation; a repeated entry is there each time."""
        return tuple(backend.device for backend in self._session.engine.backends)

    @property
    def trace_count(self) -> int:
        """How many times the model was traced."""
        return self._runner.trace_count

    def own_losses(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    ) -> tuple[OwnLoss, ...]:
        """The scalar losses among the model's outputs, and what each is a sum or a mean of, as its graph tells.

        For integrations that put losses together themselves. The model is traced if no trace serves such a call.

        Args:
            args: the model's arguments, of one microbatch.
            kwargs: its keyword arguments.
            batch: both, of the batch that the microbatch is a piece of.

        Returns:
            One per loss whose meaning the graph tells; none where the model runs without a graph, or mixes samples.

        Raises:
            OnlyWholeError: the model can run the batch, and not the microbatch.
        """
        if not isinstance(self._runner, ChainRunner):
            return ()
        with self._session.call():
            chain = self._runner.source.chain_for(args, kwargs, None, batch, or_whole=True)
        return () if chain is None or chain.mixes_samples else chain.own_losses

    def num_microbatches_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Into how many microbatches a batch with these arguments is to be cut, as the run config says.

        For integrations that cut batches themselves. What is left to choice (``"auto"``) is that which is predicted to
        be fastest of those that fit; before the first call it is the built-in number.

        Args:
            args: the model's arguments, of the whole batch.
            kwargs: its keyword arguments.
        """
        if isinstance(self._runner, ChainRunner):
            return self._runner.num_microbatches_for(args, kwargs)
        return resolve(None, self._session.config, num_devices=self.num_workers).num_microbatch

    def partition_table(self) -> str:
        """The layers and the stages as a table: those of the latest call, else those of a call like the example."""
        return self._runner.partition_table()

    def peak_device_bytes(self, reset: bool = False) -> int:
        """Largest number of bytes in use at once on any device since the last reset.

        A CPU worker counts weights and carried values, and what layers and losses allocate only if it has a limit
        (``Device("cpu", memory_bytes=...)``).
        """
        check_flag("reset", reset)
        return max(self._session.engine.peak_bytes(reset))

    @contextmanager
    def record_timeline(self, path: str | os.PathLike[str] | None = None) -> Iterator[Timeline]:
        """Record what runs inside: compute, copies and waits of every worker, and the optimizer's thread.

        Recording waits for nothing, so what is recorded runs as it does otherwise; the end of the context waits for
        all that was begun in it. An error inside leaves the timeline of what ran before it.

        ::

            with model.record_timeline("run.json") as timeline:
                train_a_few_steps()
            timeline.save("run.png")

        On CPU workers with link speeds, copies take the link's time. On accelerators, spans are those of the device's
        streams, placed on the host's clock by one moment at the beginning.

        Args:
            path: written at the end; ``.json`` for ui.perfetto.dev, ``.png`` for a picture. None: see `Timeline.save`.

        Yields:
            `Timeline`, whose ``spans`` are there once the context has ended.

        Raises:
            ConfigError: a timeline is being recorded already, or the file can't be written; raised at the beginning.
            ClosedError: the model was closed.
        """
        session = self._session
        session.check_open()
        if path is not None:
            check_path(path)
        timeline = Timeline(name=session.name)
        recorder = session.optimizer.log.recorder = session.engine.start_recording()
        try:
            yield timeline
        finally:
            try:
                session.engine.stop_recording()
                session.optimizer.wait_update()
            finally:
                session.optimizer.log.recorder = None
            timeline.fill(recorder.finish())
            if path is not None:
                timeline.save(path)

    def report(self) -> RunReport:
        """What happened since the report before, or since the model was made; waits for nothing.

        Speed in samples and tokens, seconds per round as measured and as predicted, where each worker's time went,
        bytes moved, memory of devices and host. ``print(model.report())`` shows it as a table.
        """
        self._session.gates.board.check_here()
        return make_report(self._session)

    def __repr__(self) -> str:
        return self.partition_table()
