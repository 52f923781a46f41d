"""What came of a step: sampled tokens -> sequences, finish reasons, events. No device, no planning."""

from __future__ import annotations

import msgspec

from rose.engine.scheduler import Flight, Scheduler
from rose.engine.sequence import Sequence, SequenceState
from rose.protocol.event import (
    ErrorEvent,
    FinishedEvent,
    FinishReason,
    FromEngine,
    TokensEvent,
)
from rose.runtime.plan import StepResult


def commit(
    scheduler: Scheduler, flight: Flight, result: StepResult
) -> tuple[list[FromEngine], list[str]]:
    """Append the tokens of a step and end the sequences that are done.

    A sequence that ended while the step was in flight (stop token one step before, abort) is skipped: its
    token is the one that overlapping gives away. So is the token after the start of a grammar.

    Returns  events in the order of the step, a FinishedEvent right after the last tokens of its request;
             and the ids of the requests that ended, those that failed (an ErrorEvent) not among them
    """
    assert flight.step == result.step, f"step {result.step} is committed in place of {flight.step}"
    events: list[FromEngine] = []
    ended: list[str] = []
    tokens_of, is_over = result.token_ids, SequenceState.FINISHED
    logprobs_of, damaged = result.logprobs, result.damaged_slots
    for slot, sequence in zip(flight.slots, flight.sequences, strict=True):
        if sequence.state is is_over:
            continue
        if sequence.num_stale:
            sequence.drop_stale()
            continue
        if slot in damaged:
            # LIMIT: the prefix cache may have its pages already, and a later request that finds them fails likewise,
            # though what damaged them be gone. The engine has to be started again then, as the message says.
            scheduler.finish(sequence)
            events.append(_not_finite(sequence))
            continue
        taken, reason = sequence.append(tokens_of[slot])
        event = TokensEvent(request_id=sequence.request_id, token_ids=taken)
        if slot in logprobs_of:
            logprobs = logprobs_of[slot][: len(taken)]
            event = msgspec.structs.replace(event, logprobs=logprobs)
        if sequence.num_cached_tokens:
            event = _with_cached_tokens(sequence, event)
        events.append(event)
        if reason is not None:
            scheduler.finish(sequence)
            ended.append(sequence.request_id)
            events.append(finished(sequence, reason))
    return events, ended


def _with_cached_tokens(sequence: Sequence, event: TokensEvent) -> TokensEvent:
    """Report the cached tokens of a sequence, once."""
    cached, sequence.num_cached_tokens = sequence.num_cached_tokens, 0
    return msgspec.structs.replace(event, num_cached_tokens=cached)


def _not_finite(sequence: Sequence) -> ErrorEvent:
    return ErrorEvent(
        request_id=sequence.request_id,
        code="logits_not_finite",
        message=f"the model gave no finite logits after {sequence.num_output_tokens} tokens of output, so there is no "
        "next token; its weights or the device are damaged: the operator of this server should check both and start it "
        "again",
    )


def finished(sequence: Sequence, reason: FinishReason) -> FinishedEvent:
    """Return the last event of a request."""
    return FinishedEvent(
        request_id=sequence.request_id,
        reason=reason,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_output_tokens=sequence.num_output_tokens,
    )
