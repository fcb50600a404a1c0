# %% [markdown]
# # Settings side by side
# Of all sweeps that vary some: a line a setting, a group of columns a workload. Most are on development prompts.

# %%
from tracedraft.analysis import notebook, tuning
from tracedraft.analysis.pooling import chosen

notebook.table("settings", tuning.settings_table, chosen(notebook.load(), tuning=True))
