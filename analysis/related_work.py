# %% [markdown]
# # In the layouts of the OnlineSPEC and OSD papers
# Filled as far as there are runs.

# %%
from tracedraft.analysis import figures, notebook, related
from tracedraft.analysis.panels import by_step
from tracedraft.analysis.pooling import chosen

short = chosen(notebook.load(), "protocol_onlinespec", "short_workloads")
tried = chosen(notebook.load(), tuning=True)

# %% [markdown]
# ## OnlineSPEC: methods, targets, and time with training counted

# %%
notebook.table("onlinespec_benchmarks", related.benchmarks, short)
notebook.table("onlinespec_targets", related.targets, short)
notebook.table("onlinespec_training_time", related.training_time, short)

# %% [markdown]
# ## OnlineSPEC: step size and warm-up
# Step sizes were chosen on development prompts; these tables show which prompts they are on.

# %%
rates = ("adapter.lr", "adapter.outer.lr")
notebook.table("onlinespec_step_size", related.sensitivity, tried, "Step size", rates)
notebook.figure("step_size", figures.learning_rates, by_step, tried)
title, warm_up = "Conversations before the first update", ("adapter.outer.warm_up",)
notebook.table("onlinespec_warm_up", related.sensitivity, tried, title, warm_up)

# %% [markdown]
# ## OSD: acceptance rate by data set, and what its loss and its tokens do

# %%
notebook.table("osd_alpha", related.alphas, short)
title, loss = "Loss of a learner between requests", ("adapter.outer.loss",)
notebook.table("osd_loss", related.sensitivity, tried, title, loss)
title, tokens = "Whose tokens a learner between requests learns from", ("adapter.outer.tokens",)
notebook.table("osd_tokens", related.sensitivity, tried, title, tokens)
