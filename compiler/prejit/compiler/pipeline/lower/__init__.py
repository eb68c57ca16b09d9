"""From the plan to submitted programs: checks, lowering here and in other processes, traces that are kept."""
