# %% [markdown]
# # Learning between requests, and inside them as well
# OSD, optimistic and ensemble learners alone and with Reset or Persistent. From sweeps whose names begin with
# `combinations`; where there are none, from `stream_outer`.

# %%
from tracedraft.analysis import figures, notebook, paper
from tracedraft.analysis.panels import by_stream, with_base_learners
from tracedraft.analysis.pooling import chosen

data = chosen(notebook.load(), "combinations", "stream_outer")

# %%
notebook.table("combinations", paper.combinations, data)

# %%
notebook.figure("over_stream_outer", figures.over_stream, by_stream, data, paper.OUTER)

# %% [markdown]
# ## What an ensemble makes of its step sizes

# %%
notebook.figure("ensemble_weights", figures.ensemble_weights, with_base_learners, data)
notebook.figure("regret", figures.regret, with_base_learners, data)
