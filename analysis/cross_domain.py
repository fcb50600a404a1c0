# %% [markdown]
# # Streams that change domain
# Persistent keeps what it learns, and the stream then turns to something else (`experiment=cross_domain`).

# %%
from tracedraft.analysis import figures, notebook, paper
from tracedraft.analysis.panels import by_stream
from tracedraft.analysis.pooling import chosen

data = chosen(notebook.load(), "cross_domain")

# %%
table = notebook.table(paper.cross_domain(data))

# %% [markdown]
# ## Along each stream

# %%
notebook.figure(figures.over_stream(by_stream(data)), "over_stream")
