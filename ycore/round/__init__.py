"""The loop on one training rank: draw, generate, score, keep, until the step has what it trains on."""
