# %% [markdown]
# # First steps: how good is a model at a site that nobody trained on?
#
# Six sites have handwritten digits, each at another angle. In turn one of them takes no part in the training, and tests
# the model of the others. In Colab: *File → Upload notebook*. Without fedshift, run the next line without its `#`.

# %%
# # %pip install "fedshift[report,tables]"

# %%
import fedshift

digits = {
    "name": "first_steps",
    "data": {"name": "rotated_digits", "per_class": 45},
    "protocol": {"targets": ["D0", "D75"], "seeds": [0]},
    "model": "mnist_cnn",
    "training": {"rounds": 40, "batch_size": 64, "lr": 0.05},
    "methods": ["alone", "fedavg", "recipe"],
}

# %% [markdown]
# `check` trains nothing: it says what the data are, what the runs will cost, and what would go wrong.

# %%
print(fedshift.check(digits))

# %% [markdown]
# `run` trains, and shows the table. `alone`: each site by itself. `fedavg`: federated averaging. `recipe`: what
# fedshift recommends; it moves its training images, so it is *augmented*, and the others are not.

# %%
results = fedshift.run(digits)
results

# %% [markdown]
# The verdict says what follows, and what one seed cannot tell.

# %%
print(results.verdict())

# %% [markdown]
# The same runs as a data frame, a row for each run. The last line writes a page with every curve, site and byte.

# %%
results.to_frame()

# %%
print(results.page())
