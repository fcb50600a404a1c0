# %% [markdown]
# # What learning costs, and how many conversations it takes to see a gain

# %%
from tracedraft.analysis import costs, notebook
from tracedraft.analysis.pooling import chosen

data = chosen(notebook.load())

# %%
notebook.table("costs", costs.cost_table, data)
notebook.table("power", costs.power_table, data)
