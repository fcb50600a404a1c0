# %% [markdown]
# # Settings side by side
# Of all sweeps that vary some: a line a setting, a group of columns a workload. Most are on development prompts.

# %%
from tracedraft.analysis import notebook, tuning

table = notebook.table(tuning.settings_table(notebook.load()))
