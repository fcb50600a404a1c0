# %% [markdown]
# # In the layouts of the OnlineSPEC and OSD papers
# Filled as far as there are runs.

# %%
from tracedraft.analysis import figures, notebook, related
from tracedraft.analysis.panels import by_step
from tracedraft.analysis.pooling import chosen

data = notebook.load()
short = chosen(data, ("short_workloads", "onlinespec"), "stream_outer")

# %% [markdown]
# ## OnlineSPEC: methods, targets, and time with training counted

# %%
notebook.table(related.benchmarks(short))
notebook.table(related.targets(short))
notebook.table(related.training_time(short))

# %% [markdown]
# ## OnlineSPEC: step size and warm-up
# Step sizes were chosen on development prompts; these tables show which prompts they are on.

# %%
rates = ("adapter.lr", "adapter.outer.lr")
notebook.table(related.sensitivity(data, "onlinespec_step_size", "Step size", rates))
warm_up = ("adapter.outer.warm_up",)
notebook.table(related.sensitivity(data, "onlinespec_warm_up", "Conversations before the first update", warm_up))
notebook.figure(figures.learning_rates(by_step(data)), "step_size")

# %% [markdown]
# ## OSD: acceptance rate by data set, and what its loss and its tokens do

# %%
notebook.table(related.alphas(short))
notebook.table(related.sensitivity(data, "osd_loss", "Loss of a learner between requests", ("adapter.outer.loss",)))
objective = ("adapter.outer.objective", "adapter.outer.tokens")
notebook.table(related.sensitivity(data, "osd_tokens", "What a learner between requests learns from", objective))
