"""The part that runs inside vLLM; the only folder that imports it."""
