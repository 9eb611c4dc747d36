"""Counts of a session: what its programs read and sampled, and how long the host waited."""

from __future__ import annotations

import dataclasses
from collections import Counter

from spell_jax.sampler.answers import SlotTokens


@dataclasses.dataclass
class Counts:
    """Counters of a session.

    Attributes:
      prompt_tokens: prompt tokens of all submitted requests.
      prefill_calls: calls of the prefill program.
      prefill_pages: pages that the prefill calls read.
      decode_calls: calls of the decode program.
      decode_steps: passes of the decode loop, over all calls.
      tokens: sampled tokens.
      slot_steps: slots times decode passes.
      busy_slot_steps: slot steps that sampled at least one token (several, with speculation).
      starved_slot_steps: slot steps that sampled nothing while a request was queued.
      group_slot_steps: cells times passes, over the decode rows in use.
      padded_group_slots: group_slot_steps of cells without a sequence.
      prefilled_tokens: prompt tokens that were read, not taken from a shared prefix.
      device_wait_seconds: seconds per agent in which the host was blocked by the device.
    """

    prompt_tokens: int = 0
    prefill_calls: int = 0
    prefill_pages: int = 0
    decode_calls: int = 0
    decode_steps: int = 0
    tokens: int = 0
    slot_steps: int = 0
    busy_slot_steps: int = 0
    starved_slot_steps: int = 0
    group_slot_steps: int = 0
    padded_group_slots: int = 0
    prefilled_tokens: int = 0
    # A decode call serves many agents, so its wait is divided in proportion to their sampled tokens
    # and to their prompt tokens prefilled since the previous wait.
    device_wait_seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    def add_decode(self, tokens: SlotTokens, cells: int, empty: int, has_queued: bool) -> None:
        """Add the counts of a decode call, given the call's result on the host.

        `cells` is the number of cells of the decode rows in use, `empty` the number of cells in
        these rows without a sequence. `has_queued` says whether a request was queued for a slot.
        """
        slot_steps = tokens.passes * len(tokens.new)
        self.decode_calls += 1
        self.decode_steps += tokens.passes
        self.tokens += sum(tokens.new)
        self.slot_steps += slot_steps
        self.busy_slot_steps += tokens.busy
        self.starved_slot_steps += (slot_steps - tokens.busy) * has_queued
        self.group_slot_steps += tokens.passes * cells
        self.padded_group_slots += tokens.passes * empty

    def add_wait(self, seconds: float, processed: Counter[str]) -> None:
        """Divide a wait among agents in proportion to tokens `processed` since the last wait."""
        # Nothing is processed before the first call, and a wait must not divide by zero.
        total = processed.total() or 1
        for agent, tokens in processed.items():
            before = self.device_wait_seconds.get(agent, 0.0)
            self.device_wait_seconds[agent] = before + seconds * tokens / total
