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
table = notebook.table(paper.eight_workloads(data))

# %% [markdown]
# ## Where an update pays for itself
# Long answers leave more to gain from what was learnt in them.

# %%
lengths = notebook.table(costs.length_table(data))
pools = by_temperature(data, paper.INNER)
notebook.figure(figures.by_length(pools), "gain_by_length")

# %% [markdown]
# ## Acceptance by depth, and where the time goes

# %%
notebook.figure(figures.by_depth(pools), "acceptance_by_depth")
notebook.figure(figures.phase_shares(pools), "phase_shares")
