# %% [markdown]
# # Learning between requests, and inside them as well
# OSD, optimistic and ensemble learners alone and with Reset or Persistent (`experiment=combinations`).

# %%
from tracedraft.analysis import figures, notebook, paper
from tracedraft.analysis.panels import with_base_learners
from tracedraft.analysis.pooling import chosen

data = chosen(notebook.load(), "combinations")

# %%
table = notebook.table(paper.combinations(data))

# %% [markdown]
# ## What an ensemble makes of its step sizes

# %%
runs = with_base_learners(data)
notebook.figure(figures.ensemble_weights(runs), "ensemble_weights")
notebook.figure(figures.regret(runs), "regret")
