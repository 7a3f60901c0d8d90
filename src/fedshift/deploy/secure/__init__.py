"""Secure aggregation at a deployed site: whose certificate signed a key, and what the site masks and unmasks.

Double masking after Bonawitz et al., *Practical Secure Aggregation for Privacy-Preserving Machine Learning* (CCS
2017), with pieces of the package `cryptography`: X25519, HKDF-SHA-256, ChaCha20 as generator, ChaCha20-Poly1305. H is
the number of sites that are asked (the roster), t = ⌈(H + c + 1)/2⌉, where c is the largest `policy.colluders` of its
sites, 0 if none says more.

```text
            site u                                             server
once a run  key pair                       ── key, signature ─▶  hands all keys to all sites
sum 1       checks keys, roster, pins      ◀─ roster, content ─
            y_u = x_u + PRG(b_u) ± Σ PRG(s_uv)
            shares of b_u and of all s_uv,
            sealed for each site           ── y_u, sealed ────▶  adds y_u, keeps what is sealed
sum 2       writes down the set            ◀─ who answered ─
            a code for each other of them  ── codes ─────────▶  hands the codes for u to u, with
            checks t codes, opens          ◀─ sealed for u ───  what was sealed for u
            of those who answered: b_v     ── shares ─────────▶  takes off b_v of those who answered,
            between them and the lost: s_vw                      and s_vw between them and the lost
```

* **Key.** One X25519 key per site and run, kept in the site's folder, signed over run, name and key with the key of
  the site's kit. Another key in the same run is refused, and a site that lost its key counts as lost. The others
  check for themselves whose certificate signed it.
* **Binding.** All seeds and sealing keys are derived with a digest of run, exchange, call, roster with keys, t, how
  contributions are weighted, the run's setting, the site's role, how its data are split, how much work each site has
  left, and the content that the site was sent. If a server sends different models to different sites, the masks do
  not cancel, and the sites cannot open each other's shares.
* **Self masks** b_u are 32 bytes of the system's randomness, new for each sum, never from the seed of the experiment.
* **Once.** Before an answer leaves, a site writes it to disk with the roster and content that it masked for. Asked
  again it gives the same answer; for another roster or content of the same exchange it refuses.
* **Never both.** The others reveal shares of b for a site that answered, and shares of the pairwise seeds for a lost
  one, never both.
* **One set of survivors.** Before it reveals anything, each site has codes of t sites, itself included, that confirm
  the same set: an HMAC over the set with a key that only its two sites can derive. No two sets of t sites are
  disjoint, and each site confirms one set. Otherwise a dishonest server could show each site another set, pool the
  shares and unmask a sum of only two sites of five.
* **Lost sites** (with noise, or `roster: any`). Any may be lost before the first answer, and any before the second,
  as long as t answer both.
* **Checks at the site.** A site checks its own reply as the server would, and its `exposure` score, before it masks;
  a diverged model is refused there. It masks only what the server of the run's method reads as sums; other kinds,
  such as styles, have to be allowed by `send` in a sum, too.
* **Layout.** What the integers stand for is sent unencrypted. A site whose contribution has a different layout from
  most is left out.
* **Wrong shares.** Seeds have commitments. Wrong shares of a few are left out; otherwise the sum fails with the name
  of the site whose seed could not be found. A site can always make a sum fail.

**Integers.**

A number x with weight w becomes round(w · x · 2^32) modulo 2^64, so sums do not depend on the order of the sites.
Rounding changes a mean by at most 2^-33 divided by the mean weight. A site refuses a number that could bring the sum
above 2^62, and a weight below 2^-20, with which the sum would be of larger sites alone; nothing is clipped. N_k is
divided by a power of two, so that weights sum to at most 1.

BatchNorm's running means and variances are averaged like weights; counters become their rounded mean. Rounded weights
(`engine.wire`) apply to what sites are sent, not to the integers. Each contribution starts with the number 1: if
these do not add up to the number of sites, a mask was left over (unnoticed with probability 2^-64), and the round
fails.

**CSAC from sums alone.**

CSAC weighs each layer of each site by its distance d to the mean A. With secure aggregation A goes back to the sites.
Each answers with d and d · (G − A), of which the server gets the sums: A + Σ d (G − A) / Σ d is CSAC's model. No
distance and no model leaves a site. This takes one more exchange a round, `weigh`, answered once for each model.
`aggregation: similarity` is not possible in this way, nor a `distance_power` above 2: with a large power one site
dominates the sum, and the sum reveals its model. With d the farthest of n sites has at most half of the sum, with d²
(`setting: practical`) at most (n − 1)/n.

**When something dies, or lies.**

* A site is lost before its first answer: the run ends and names it, and goes on when it is back; with noise, or
  `roster: any`, and `quorum` it is left out.
* A site is lost between the exchanges: its contribution counts, as long as t sites tell their shares; with fewer the
  run ends and names them.
* Coordinator or site is killed between the exchanges: the same sum is asked for again, and the run ends in the same
  bits.
* A masked answer is garbage: its site is named and, with `quorum`, left out. Wrong shares are left out, as long as t
  right ones are there (among more than 13 sites as long as few are wrong: 3 of 20, 2 of 50).
* The coordinator asks for another roster or content, or for two sets of survivors: sites refuse, and their audit logs
  have it.

A run whose settings change needs another name. Sites keep what a sum needs in `memory/RUN/sums`, encrypted if a key
is set.
"""
