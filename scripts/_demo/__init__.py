"""The demonstration: a language model learns by reinforcement while a live vLLM follows it."""
