"""Inspection of plans: memory map, explanation of the peak, exports."""
