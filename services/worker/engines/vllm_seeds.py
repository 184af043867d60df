"""Seeded requests on a CPU: a generator whose draw is thrown away goes back to where it was.

A step that ends in the midst of a prompt samples a token all the same, and drops it. vLLM then turns the request's generator back by an
offset, which a CPU's generators do not have: the engine dies of a seeded prompt that is longer than a step, or that is computed anew in
pieces (vLLM 0.32). Here the whole state is kept and put back.
"""

from __future__ import annotations

from typing import Any


def keep_generators(runner: Any) -> None:
    """Safe to repeat. Does nothing where generators have an offset."""
    if runner.device.type != "cpu" or hasattr(runner, "_trimtab_keeps_generators"):
        return
    runner._trimtab_keeps_generators = True
    sample, book = runner._sample, runner._bookkeeping_sync

    def thrown_away() -> dict[int, Any]:
        batch = runner.input_batch
        mask = runner.discard_request_mask.np
        return {row: generator for row, generator in batch.generators.items() if row < batch.num_reqs and mask[row]}

    def sample_and_put_back(*args: Any, **kwargs: Any) -> Any:
        states = [(generator, generator.get_state()) for generator in thrown_away().values()]
        output = sample(*args, **kwargs)
        for generator, state in states:
            generator.set_state(state)
        return output

    def book_without_them(*args: Any, **kwargs: Any) -> Any:
        generators, aside = runner.input_batch.generators, thrown_away()
        for row in aside:
            del generators[row]
        try:
            return book(*args, **kwargs)
        finally:
            generators.update(aside)

    runner._sample, runner._bookkeeping_sync = sample_and_put_back, book_without_them
