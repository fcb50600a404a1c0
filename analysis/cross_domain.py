# %% [markdown]
# # Streams that change domain
# What a learner keeps meets something else. From sweeps whose names begin with `cross_domain`, `stream_inner` or
# `stream_outer`.

# %%
from tracedraft.analysis import figures, notebook, paper
from tracedraft.analysis.panels import by_stream
from tracedraft.analysis.pooling import chosen

data = chosen(notebook.load(), ("cross_domain", "stream_inner", "stream_outer"))

# %%
notebook.table("cross_domain", paper.cross_domain, data)

# %% [markdown]
# ## Along each stream

# %%
notebook.figure("over_stream", figures.over_stream, by_stream, data, paper.INNER)
