// The sections of a run's page below the overview, but time and rollouts. Each takes the page's data and gives nodes.
"use strict";

const ACCOUNTS = [
  ["trained", "trained", "var(--c0)"],
  ["masked", "masked", "var(--c4)"],
  ["discarded", "discarded", "var(--c1)"],
  ["in_flight", "in flight", "var(--wait)"],
];

function learning(data) {
  const names = Object.keys(data.evals);
  const make = (axis) =>
    names.map((name, i) => {
      const points = data.evals[name].filter((e) => known(axis === "step" ? e.step : e.seconds));
      return {
        name,
        color: color(i),
        dots: true,
        x: points.map((e) => (axis === "step" ? e.step : e.seconds)),
        y: points.map((e) => e.value),
        lo: points.map((e) => e.low),
        hi: points.map((e) => e.high),
      };
    });
  let evals = null;
  if (names.length) {
    evals = chart({ title: "Evaluation", note: "held-out; band: 95 % interval", lines: make("step") });
    curves.push((change) => evals.update(change.axis ? { axis: change.axis, lines: make(change.axis) } : {}));
  }
  return grid(
    evals?.box,
    curve(data, { title: "Reward", note: "mean of the batch", keys: [["reward/mean", "mean"]] }),
    curve(data, { title: "Spread of rewards", note: "standard deviation", keys: [["reward/std", "std"]], zero: true }),
  );
}

function staleness(data) {
  const lags = Object.entries(data.lags).map(([lag, figures]) => ({ lag: Number(lag), ...figures }));
  const bound = data.bound;
  const total = lags.reduce((sum, row) => sum + (row.tokens || 0), 0);
  // Lag 0 and the lags with the most tokens, as many as there are colours.
  const shown = [...lags]
    .sort((a, b) => (a.lag !== 0) - (b.lag !== 0) || (b.tokens || 0) - (a.tokens || 0))
    .slice(0, 8)
    .sort((a, b) => a.lag - b.lag);
  const byStep = (name) => [
    [name === "kl" ? "kl/sampler" : name === "ess" ? "ess" : "clip/fraction", "all", "var(--ink)"],
    ...shown.map((row, i) => [`lag_${row.lag}/${name}`, `lag ${row.lag}`, color(i)]),
  ];
  return [
    grid(
      lags.length &&
        barChart({
          title: "Trained tokens by lag",
          note: "lag: trainer's version minus the version that sampled the token",
          color: "var(--c0)",
          bars: filledLags(lags, bound).map((row) => ({
            name: String(row.lag),
            value: row.tokens || 0,
            title: percent((row.tokens || 0) / total, 1),
          })),
          mark: known(bound) && bound < 200 ? bound : null,
          markName: `rollout.max_staleness ${bound}`,
        }),
      curve(data, {
        title: "Lag by step",
        keys: [
          ["lag/mean", "mean"],
          ["lag/max", "oldest"],
        ],
        zero: true,
        refs: known(bound) ? [{ y: bound, name: "bound" }] : [],
      }),
      curve(data, {
        title: "Importance ratio",
        note: "policy / sampler, per token",
        keys: [
          ["ratio/mean", "mean"],
          ["ratio/min", "lowest"],
          ["ratio/max", "highest"],
        ],
        format: (x) => fmt(x, 5),
      }),
      curve(data, { title: "KL(sampler ‖ policy)", note: "k3 estimate, nats per token", keys: byStep("kl") }),
      curve(data, {
        title: "Effective sample size",
        note: "share of the tokens that the batch is worth",
        keys: byStep("ess"),
        format: (x) => fmt(x, 4),
      }),
      curve(data, {
        title: "Clipped tokens",
        note: "share whose gradient is cut",
        keys: byStep("clip_fraction"),
        zero: true,
        format: share,
      }),
    ),
    lags.length
      ? [
          el(
            "p.lead",
            {},
            "By lag, over the whole run (means weighted by tokens). Lag 0 is the numerical floor of the engine; what is above it is policy lag.",
          ),
          table({
            label: "Figures by lag",
            rows: lags,
            columns: [
              { name: "lag", num: true, value: (row) => row.lag, cell: (row) => String(row.lag) },
              { name: "tokens", num: true, value: (row) => row.tokens, cell: (row) => count(row.tokens) },
              {
                name: "share",
                num: true,
                value: (row) => row.tokens / total,
                cell: (row) => percent(row.tokens / total, 1),
              },
              ...[
                ["ratio_mean", "ratio"],
                ["ratio_min", "lowest"],
                ["ratio_max", "highest"],
                ["kl", "KL"],
                ["ess", "ESS"],
                ["clip_fraction", "clipped"],
              ]
                .filter(([key]) => lags.some((row) => known(row[key])))
                .map(([key, name]) => ({ name, num: true, value: (row) => row[key], cell: (row) => fmt(row[key], 4) })),
            ],
          }).box,
        ]
      : null,
  ];
}

// All lags from 0 to the bound, so that an empty one shows as empty.
function filledLags(lags, bound) {
  const top = Math.min(200, Math.max(...lags.map((row) => row.lag), bound ?? 0));
  const byLag = new Map(lags.map((row) => [row.lag, row]));
  return Array.from({ length: top + 1 }, (_, lag) => byLag.get(lag) || { lag, tokens: 0 });
}

const update = (data) =>
  grid(
    curve(data, { title: "Entropy", note: "nats per token", keys: [["entropy", "entropy"]], zero: true }),
    curve(data, {
      title: "Gradient norm",
      note: "before clipping",
      keys: [["grad_norm", "norm"]],
      zero: true,
      refs: known(data.max_grad_norm) ? [{ y: data.max_grad_norm, name: "clipped at" }] : [],
    }),
    curve(data, {
      title: "Update size",
      note: "‖new − old‖ / ‖old‖ of the parameters, per optimizer step",
      keys: [["update_size", "update"]],
      zero: true,
    }),
    curve(data, { title: "Loss", note: "its value says little in policy gradient", keys: [["loss", "loss"]] }),
    // A constant rate needs no plot.
    new Set((data.series.columns.lr || []).filter(known)).size > 1
      ? curve(data, { title: "Learning rate", keys: [["lr", "lr"]], zero: true })
      : null,
  );

function completions(data) {
  const groups = data.counts.groups;
  return [
    groups > 0 &&
      el(
        "p.lead",
        {},
        `${plural(groups, "group")} of ${plural(data.counts.completions, "completion")} in all; in ${count(data.counts.zero_variance)} (${percent(data.counts.zero_variance / groups, 1)}) all rewards are equal.`,
      ),
    grid(
      curve(data, {
        title: "Completion length",
        note: "tokens, mean of the batch",
        keys: [["completion/length_mean", "mean"]],
        zero: true,
      }),
      curve(data, {
        title: "Truncated completions",
        note: "cut at data.max_tokens",
        keys: [["completion/truncated_fraction", "share"]],
        zero: true,
        format: share,
      }),
      curve(data, {
        title: "Groups without signal",
        note: "all rewards equal, per step",
        keys: [
          ["groups/zero_variance", "equal"],
          ["groups/all_right", "all right"],
          ["groups/all_wrong", "all wrong"],
        ],
        zero: true,
      }),
    ),
  ];
}

function ledger(data) {
  const l = data.ledger;
  const broken = data.ledger_broken;
  const outcomes = Object.entries(data.counts.outcomes).map(([outcome, n]) => ({
    outcome,
    n,
    tokens: data.counts.outcome_tokens[outcome] || 0,
  }));
  return [
    l &&
      el(
        "div.card.wide",
        { id: "ledger-bar" },
        el("h3", {}, `${count(l.generated)} generated tokens after the last step`),
        shareBar({
          parts: ACCOUNTS.map(([key, name, c]) => ({ name, value: l[key], color: c })),
          format: count,
          label: "Token ledger",
          total: Math.max(l.generated, l.generated - l.missing),
        }),
        l.missing === 0 && !broken && data.ledger_lines
          ? el(
              "p.note",
              {},
              `The accounts add up: ${ACCOUNTS.map(([key]) => count(l[key])).join(" + ")} = ${count(l.generated)}, and so they do in all ${plural(data.ledger_lines, "line")} of metrics.jsonl.`,
            )
          : el(
              "p",
              {},
              el("span.flag.bad", {}, "does not add up"),
              l.missing !== 0
                ? ` ${count(Math.abs(l.missing))} tokens ${l.missing > 0 ? "are in no account" : "are in an account but were never generated"} after the last step;`
                : "",
              ` ${count(broken)} of ${plural(data.ledger_lines, "line")} of metrics.jsonl are wrong.`,
            ),
      ),
    outcomes.length > 0 &&
      table({
        label: "Completions by outcome",
        rows: outcomes,
        sort: { column: 2, down: true },
        columns: [
          { name: "outcome of the completion (rollouts.jsonl)", value: (row) => row.outcome },
          { name: "completions", num: true, value: (row) => row.n, cell: (row) => count(row.n) },
          { name: "tokens", num: true, value: (row) => row.tokens, cell: (row) => count(row.tokens) },
        ],
      }).box,
    !l && !outcomes.length && el("p.muted", {}, "Nothing recorded."),
  ];
}

function rolloutsSection(data) {
  if (!data.counts.completions) return el("p.muted", {}, "No rollouts recorded.");
  const all = data.rollout_rows === data.counts.completions;
  return [
    el(
      "p.lead",
      { id: "sampled" },
      all
        ? `All ${plural(data.counts.completions, "completion")}.`
        : `A sample: ${count(data.rollout_rows)} of ${plural(data.counts.completions, "completion")} (whole groups, chosen at random, and the groups of the best, worst, longest and strangest of all). Counts elsewhere on the page are over all of them; rollouts.jsonl has every one.`,
      data.traces &&
        ` ${data.traces.rows === data.rollout_rows ? "All of them" : `${count(data.traces.rows)} of them (the best, worst, longest and strangest first)`} can be read token by token; tokens/ has every one.`,
      " Choose a row to read its group side by side.",
    ),
    rolloutsExplorer(data.groups, data.traces),
  ];
}

function settings(data) {
  const keys = Object.keys(data.series.columns).filter((key) => key !== "step");
  const any = keys.length > 0 && el("div.card.wide", {});
  if (any) {
    const start = keys.includes("reward/mean") ? "reward/mean" : keys[0];
    const made = chart({ title: "Any metric", lines: [line(data, start, start, "var(--c0)", "step")] });
    let key = start,
      axis = "step";
    const change = (more) => {
      if (more.axis) axis = more.axis;
      made.update({ ...more, lines: [line(data, key, key, "var(--c0)", axis)] });
    };
    curves.push(change);
    any.append(
      el(
        "div.controls",
        {},
        el(
          "label",
          {},
          "metric",
          el(
            "select",
            {
              id: "any-metric",
              onchange: (event) => {
                key = event.target.value;
                change({});
              },
            },
            keys.map((name) => el("option", { value: name, selected: name === start ? "" : null }, name)),
          ),
        ),
      ),
      made.box,
    );
  }
  const facts = (label, pairs) =>
    pairs.length > 0 && [
      el("h3", {}, label),
      scroller(
        label,
        el(
          "table.facts-table",
          {},
          el(
            "tbody",
            {},
            pairs.map(([key, value]) => el("tr", {}, el("td", {}, prose(key)), el("td.mono", {}, prose(value)))),
          ),
        ),
      ),
    ];
  return [
    any,
    el(
      "div.grid",
      {},
      el("div", {}, facts("Environment", data.environment)),
      el("div", {}, facts("Config groups", data.choices)),
    ),
    data.config &&
      el("details", {}, el("summary", {}, "Composed config"), el("pre.card.mono", { tabindex: 0 }, prose(data.config))),
  ];
}
