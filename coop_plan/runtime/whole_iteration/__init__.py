"""One plan for a whole iteration: forwards, backwards and the optimizer's updates."""
