"""Looking at a plan: what lies where and when, what holds the peak, what other tools can open."""
