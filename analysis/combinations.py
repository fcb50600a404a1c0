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
table = notebook.table(paper.combinations(data))

# %%
notebook.figure(figures.over_stream(by_stream(data, paper.OUTER)), "over_stream_outer")

# %% [markdown]
# ## What an ensemble makes of its step sizes

# %%
runs = with_base_learners(data)
notebook.figure(figures.ensemble_weights(runs), "ensemble_weights")
notebook.figure(figures.regret(runs), "regret")
