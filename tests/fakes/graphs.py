"""CUDA graphs without CUDA: the same buckets and padding, each step run eagerly."""

from __future__ import annotations

from rose.runtime.graphs import DecodeGraphs


class EagerGraphs(DecodeGraphs):
    """Runs what a replay would replay, at the bucket's rows and length; counts the buckets used."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.used = []

    def ensure(self, num_rows, max_length, flavour, prepare):
        pass

    def replay(self, num_rows, max_length, flavour):
        self.used.append(num_rows)
        return self._step(num_rows, self.length_bucket(max_length), flavour)


def use_eager_graphs(engine, batch_sizes=(1, 2, 4)):
    """Make the plain decoder of an engine run its decode steps in padded buckets."""
    decoder = engine.decoder
    decoder.graphs = EagerGraphs(
        decoder._decode_step,
        max_rows=decoder.runner.tables.padding_slot,
        max_lengths=(64, engine.status().context_tokens),
        batch_sizes=batch_sizes,
    )
    return decoder.graphs
