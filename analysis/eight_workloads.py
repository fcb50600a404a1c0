# %% [markdown]
# # What Reset and Persistent gain on eight workloads
# Each run has a fixed draft and one that learns, side by side on the same prompts (sweeps named `eight_workloads…`).

# %%
from tracedraft.analysis import costs, figures, notebook, paper
from tracedraft.analysis.panels import by_temperature
from tracedraft.analysis.pooling import chosen

data = chosen(notebook.load(), "eight_workloads")

# %% [markdown]
# ## Accepted length and throughput

# %%
notebook.table("eight_workloads", paper.eight_workloads, data)

# %% [markdown]
# ## Where an update pays for itself
# Long answers leave more to gain from what was learnt in them.

# %%
notebook.table("lengths", costs.length_table, data)
notebook.figure("gain_by_length", figures.by_length, by_temperature, data, paper.INNER)

# %% [markdown]
# ## Acceptance by depth, and where the time goes

# %%
notebook.figure("acceptance_by_depth", figures.by_depth, by_temperature, data, paper.INNER)
notebook.figure("phase_shares", figures.phase_shares, by_temperature, data, paper.INNER)
