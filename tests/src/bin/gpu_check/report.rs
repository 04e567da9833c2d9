//! The page gpu.md, which shows the figures as tables. It explains each figure and names the
//! command that measures it. It also lists the figures that are missing.

mod brief;
mod contention;
mod partitions;
mod policies;
mod table;

use std::fmt::Write;

use serde_json::Value;

pub(crate) use brief::{brief, rows as brief_rows};
use table::{Table, cell};

/// A section of the page.
struct Section {
    title: &'static str,
    /// The stage that measures the figures.
    stage: &'static str,
    /// The key of the figures. If the key is missing, the section is reported as missing.
    figure: &'static str,
    /// The explanation of the figures.
    means: &'static str,
    show: fn(&Value) -> String,
}

/// All sections, in the order of the page.
const SECTIONS: &[Section] = &[
    Section {
        title: "SMs by percentage",
        stage: "sms",
        figure: "sms_by_percent",
        means: "The number of SMs that a process may use under MPS at a percentage of active threads, as the device reports it. \
                Consecutive percentages with the same number are combined.",
        show: sms,
    },
    Section {
        title: "Contexts",
        stage: "sms",
        figure: "context_ms",
        means: "The time that a process needs under MPS before it loads anything, to initialise CUDA and to create its context, in ms. \
                If the probe does not distinguish them, there is one figure.",
        show: contexts,
    },
    Section {
        title: "Parts of a hand-over",
        stage: "handover",
        figure: "handover_ms",
        means: "Medians in ms over hand-overs between 30 % and 60 % under light load, one model at a time, batches up to 8. `effect` is \
                the time from the request to the first completed batch at the new share. Requests are served all the time.",
        show: |figures| matrix(figures, "handover_ms", &HANDOVER_PARTS),
    },
    Section {
        title: "Stall",
        stage: "handover",
        figure: "stall_us",
        means: "The longest time within a hand-over in which a batch was ready and a slot free, but no worker took the batch, in us, over all \
                hand-overs of the stages handover and lossless.",
        show: |figures| samples(figures, &[("stall", &["stall_us"])]),
    },
    Section {
        title: "Memory",
        stage: "memory",
        figure: "memory",
        means: "Memory of the whole GPU in MiB above its idle state, batches up to 32, one model at a time: with one worker, \
                with two, before and after all workers and the MPS server were killed under 50 requests/s, and after the supervisor stopped. \
                `effect` is the time from the request to the first batch at the new share, in ms.",
        show: crate::memory::show,
    },
    Section {
        title: "Hand-overs under load",
        stage: "lossless",
        figure: "handovers",
        means: "All models at the same time, each at half of its throughput while all are saturated, with repeated hand-overs between 30 % \
                and 45 %. Every answer is compared with the first one to the same input, within 2 % of its largest value. The twin \
                run has the first parts of the same arrivals, and no hand-overs.",
        show: handovers,
    },
    Section {
        title: "Shares that change inside the worker",
        stage: "partitions",
        figure: "partitions",
        means: "All models at the same time, each at half of its throughput while all are saturated. The share of each changes every 100 ms: \
                between two shares whose partitions the worker keeps ready, and between six, which are too many for that. `in effect` is the \
                time from the request to its answer, after which the next batch runs at the new share, in ms. The twin run has no changes. \
                The last table shows the latency of a model with 150 requests/s at 20 %: alone, beside a saturated model on other groups of \
                SMs (apart), and with both models on all SMs (together).",
        show: partitions::show,
    },
    Section {
        title: "Contention",
        stage: "contention",
        figure: "contention",
        means: "The mean latency of one request at a time, in ms, beside a saturated model, by the shares of both. Both have \
                partitions, which overlap if they do not fit. `alone` is the latency while the other model is idle.",
        show: contention::show,
    },
    Section {
        title: "The cost of a warming shadow",
        stage: "neighbours",
        figure: "neighbour_p99_ratio",
        means: "The p99 of requests in flight while a shadow of the model starts, loads and warms up, divided by the p99 of the same load \
                without hand-overs: of the model itself, and the worst of the other models. All models run at half of their throughput.",
        show: |figures| matrix(figures, "neighbour_p99_ratio", &["incumbent", "neighbours", "warming_s"]),
    },
    Section {
        title: "Execution times",
        stage: "profiles",
        figure: "profiles",
        means: "The execution time of a batch in ms, alone on the GPU, by SMs (rows of the table) and batch size: medians of `shadowslice \
                profile`. The same tables are in configs/profiles.",
        show: execution,
    },
    Section {
        title: "Memory of a shadow",
        stage: "sweep",
        figure: "shadow_memory_mib",
        means: "GPU memory in MiB of a worker at 30 %, batches up to 32, from nvidia-smi: the context (measured alone), the \
                weights (the size of the file), and the rest, which is activations and workspaces.",
        show: |figures| matrix(figures, "shadow_memory_mib", &["context", "weights", "activations"]),
    },
    Section {
        title: "Errors of the answers",
        stage: "sweep",
        figure: "answer_error",
        means: "The largest difference from the CPU's answers at any batch size up to 32, relative to the largest value, by share.",
        show: errors,
    },
    Section {
        title: "Pairs",
        stage: "pairs",
        figure: "pair_slowdown",
        means: "Throughput of the row's model alone at 50 %, divided by its throughput beside the column's model, also at 50 %. Both have \
                closed-loop clients with batches of 8. Clients measure the throughput, so the overhead of the host is included.",
        show: |figures| square(figures, "pair_slowdown"),
    },
    Section {
        title: "Pairs: execution",
        stage: "pairs",
        figure: "pair_execution_slowdown",
        means: "The same ratio of execution times, which shows the part of the GPU alone.",
        show: |figures| square(figures, "pair_execution_slowdown"),
    },
    Section {
        title: "Policies",
        stage: "policies",
        figure: "policies",
        means: "The same loads under each value of `controller.policy`, with the profiles above, batches up to 16, and no configured shares, in consecutive \
                spans (tests/gpu/mixes/small.yaml). *crowd*: ResNet-50 (SLO 15 ms, priority 1), BERT base (40 ms, 2) and VGG-19 (100 ms, 3), each with four \
                closed-loop clients. *hog*: ResNet-50 with the SLO in the name and priority 1 gets 300 requests/s in open loop, \
                or 20 with 5 ms (*seldom*), beside VGG-19 (100 ms, 3) with 24 closed-loop clients. *peers*: BERT base (8 ms, 1) gets \
                40 requests/s and ResNet-50 (15 ms, 1) 800 beside the same VGG-19; *by hand*: with 40, 20 and 40 % of the GPU. *step*: \
                ResNet-50 alone gets 30 requests/s, then 800. \
                Clients measure the latencies, over gRPC on a Unix socket, in open loop from the scheduled arrival. The supervisor measures \
                from the end of the request to the start of the response. Refused and failed requests count as outside the SLO.",
        show: policies::policies,
    },
    Section {
        title: "Policies with more models",
        stage: "mixes",
        figure: "mixes",
        means: "The same with five or more models at the same time (tests/gpu/mixes/five.yaml, or the files of `--mixes`), with open-loop clients. \
                The first table has a line for each span: the requests answered within the SLO, of all models and of those with the highest priority, \
                as clients measure it, in %; the same for requests due 3 s or more after the start of the span, and before that; \
                the same as the supervisor counts; the refused and failed requests, in %; the changes of shares; the delay with which clients sent \
                requests, in ms (p99 and maximum of any model); the busy cores of the host and of the clients. The second table shows, for each model, \
                the requests within the SLO as clients measure it (and as the supervisor counts), in %, and p50 and p99 in ms.",
        show: policies::mixes,
    },
    Section {
        title: "Two GPUs",
        stage: "gpus",
        figure: "gpus",
        means: "The same two models on each of two GPUs of a host, under one supervisor. First the throughput of each GPU alone and of both \
                together, with batches of 8. Then all models run at half of their throughput, while the second GPU has hand-overs and its MPS \
                server is killed: p99 in ms before, during the hand-overs, and from the kill until the models of the second GPU are ready again.",
        show: gpus,
    },
];

const HANDOVER_PARTS: [&str; 7] = ["spawn", "libraries", "context", "session", "warmup", "proof", "effect"];

/// Renders the page of the figures.
pub(crate) fn page(figures: &Value) -> String {
    let mut text = String::from("# GPU check\n\n");
    let mut line = |content: String| writeln!(text, "{content}").expect("writing to a string cannot fail");
    if let Some(what) = figures["rehearsal"].as_str() {
        line(format!("**A rehearsal** {what}.\n"));
    }
    line(format!(
        "{}, driver {}, MPS: {}; {} cores, {}; last measured {} by `make gpu-check`; the same figures as JSON: gpu.json.\n",
        cell(&figures["device"]),
        cell(&figures["driver"]),
        cell(&figures["mps"]),
        cell(&figures["host"]["cores"]),
        cell(&figures["host"]["system"]),
        cell(&figures["date"]),
    ));
    line(
        "Models have the shapes of the published networks and random weights (models/make_gpu_models.py), FP32.\n"
            .into(),
    );
    for (stage, why) in figures["failed"].as_object().into_iter().flatten() {
        line(format!("* **Stage {stage} failed**: {}", why.as_str().unwrap_or("?").replace('\n', " ")));
    }
    for Section { title, stage, figure, means, show } in SECTIONS {
        let there = figures.get(*figure).is_some_and(|value| !value.is_null());
        let body = if there { show(figures) } else { "**Missing**: not measured.\n".into() };
        let taken = &figures["stages"][*stage]["date"];
        let taken = if taken.is_null() { String::new() } else { format!(" Measured {}.", cell(taken)) };
        line(format!(
            "\n## {title}\n\n{means}{taken} `make gpu-check GPU_CHECK_ARGS=\"--stages {stage}\"`\n\n{}",
            body.trim_end()
        ));
    }
    text.trim_end().to_owned() + "\n"
}

/// Lists the number of SMs by percentage. Combines consecutive percentages that have the same
/// number of SMs.
fn sms(figures: &Value) -> String {
    let mut steps: Vec<(u64, u64, u64)> = Vec::new();
    let all = figures["sms_by_percent"].as_object().into_iter().flatten();
    let mut all: Vec<(u64, u64)> =
        all.filter_map(|(percent, sms)| Some((percent.parse().ok()?, sms.as_u64()?))).collect();
    all.sort_unstable();
    for (percent, sms) in all {
        match steps.last_mut() {
            Some(step) if step.2 == sms => step.1 = percent,
            _ => steps.push((percent, percent, sms)),
        }
    }
    let span = |from, to| if from == to { format!("{from} %") } else { format!("{from}-{to} %") };
    let steps: Vec<String> =
        steps.iter().map(|&(from, to, sms)| format!("{}: {sms}", span(from, to))).collect();
    format!("{}\n", steps.join("; "))
}

fn contexts(figures: &Value) -> String {
    samples(
        figures,
        &[("initialising CUDA, ms", &["context_ms", "init"]), ("context, ms", &["context_ms", "context"])],
    )
}

/// Renders a table of quantiles that has one row for each sample.
fn samples(figures: &Value, rows: &[(&str, &[&str])]) -> String {
    let mut table = Table::new(&["", "p50", "p99", "max", "count"]);
    for (name, path) in rows {
        let sample = path.iter().fold(figures, |tree, key| &tree[*key]);
        table.row(name, ["p50", "p99", "max", "count"].iter().map(|key| cell(&sample[*key])));
    }
    table.text()
}

/// Renders a table that has one row for each model and one column for each of the keys `parts`.
pub(crate) fn matrix(figures: &Value, figure: &str, parts: &[&str]) -> String {
    let mut table = Table::new(&[&["model"], parts].concat());
    for (model, of) in figures[figure].as_object().into_iter().flatten() {
        table.row(model, parts.iter().map(|part| cell(&of[*part])));
    }
    table.text()
}

/// Renders a table that has one row and one column for each model.
fn square(figures: &Value, figure: &str) -> String {
    let of = figures[figure].as_object();
    let models: Vec<&str> = of.into_iter().flatten().map(|(model, _)| model.as_str()).collect();
    let mut table = Table::new(&[&["beside"], models.as_slice()].concat());
    for model in &models {
        let with =
            |other: &&str| if other == model { "-".into() } else { cell(&figures[figure][*model][*other]) };
        table.row(model, models.iter().map(with));
    }
    table.text()
}

fn handovers(figures: &Value) -> String {
    let all = &figures["handovers"];
    let mut text = format!(
        "{} hand-overs completed, {} failed; {} requests sent, {} lost, {} answered wrongly.\n\n",
        cell(&all["done"]),
        all["not_done"].as_array().map_or(0, Vec::len),
        cell(&all["offered"]),
        cell(&all["lost"]),
        cell(&all["wrong"]),
    );
    let mut table = Table::new(&["model", "requests/s", "hand-overs", "requests", "p99 ms", "twin's p99 ms"]);
    for (model, of) in all["models"].as_object().into_iter().flatten() {
        let p99 = &all["p99_ms"][model];
        let cells = [&of["rate"], &of["done"], &of["offered"], &p99["with"], &p99["twin"]];
        table.row(model, cells.into_iter().map(cell));
    }
    text.push_str(&table.text());
    text
}

fn gpus(figures: &Value) -> String {
    let all = &figures["gpus"];
    if all["models"].is_null() {
        return "**Missing**: the host has only one GPU.\n".into();
    }
    let alone = all["alone_rows_per_s"].as_array().into_iter().flatten();
    let mut text = format!(
        "Alone {} rows/s, together {}: {} of the sum. {} hand-overs; models ready again {} s after the kill.\n\n",
        alone.map(cell).collect::<Vec<_>>().join(" and "),
        cell(&all["together_rows_per_s"]),
        cell(&all["together_of_alone"]),
        cell(&all["handovers"]),
        cell(&all["back_after_s"]),
    );
    let columns = ["offered", "lost", "wrong", "calm_ms", "handovers_ms", "killed_ms"];
    let mut table = Table::new(&[&["model-GPU"], columns.as_slice()].concat());
    for (model, of) in all["models"].as_object().into_iter().flatten() {
        table.row(model, columns.iter().map(|column| cell(&of[*column])));
    }
    text.push_str(&table.text());
    text
}

fn execution(figures: &Value) -> String {
    let batches = ["1", "2", "4", "8", "16", "32"];
    let mut table = Table::new(&[&["model, SMs"], batches.as_slice()].concat());
    for (model, profile) in figures["profiles"].as_object().into_iter().flatten() {
        let list = |key: &str| -> Vec<String> {
            let begin = format!("  {key}: [");
            let line =
                profile.as_str().unwrap_or_default().lines().find_map(|line| line.strip_prefix(&begin));
            let items = line.unwrap_or_default().trim_end_matches(']').split(", ");
            items.map(str::to_owned).collect()
        };
        let columns = batches.map(list);
        for (index, sms) in list("sms").iter().enumerate() {
            let times = columns.iter().map(|column| column.get(index).cloned().unwrap_or_default());
            table.row(&format!("{model}, {sms}"), times);
        }
    }
    table.text()
}

fn errors(figures: &Value) -> String {
    let all = &figures["answer_error"];
    let Some((_, some)) = all.as_object().and_then(|models| models.iter().next()) else {
        return String::new();
    };
    let shares = by_number(some);
    let heads: Vec<String> = shares.iter().map(|share| format!("{share} %")).collect();
    let heads: Vec<&str> = std::iter::once("model").chain(heads.iter().map(String::as_str)).collect();
    let mut table = Table::new(&heads);
    for (model, of) in all.as_object().into_iter().flatten() {
        table.row(model, shares.iter().map(|share| small(&of[*share])));
    }
    table.text()
}

/// Formats a small number with two significant digits.
fn small(value: &Value) -> String {
    value.as_f64().map_or_else(|| cell(value), |number| format!("{number:.1e}"))
}

/// Returns the keys of a map, sorted as numbers.
fn by_number(map: &Value) -> Vec<&str> {
    let mut keys: Vec<&str> = map.as_object().into_iter().flatten().map(|(key, _)| key.as_str()).collect();
    keys.sort_by_key(|key| key.parse::<u64>().unwrap_or(u64::MAX));
    keys
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_page_shows_figures_and_names_missing_ones() {
        let figures = json!({
            "device": "NVIDIA H200", "driver": "580", "date": "2026-11-20", "mps": null,
            "sms_by_percent": {"1": 8, "2": 8, "10": 12},
            "handover_ms": {"resnet50": {"spawn": 20.5, "effect": 3000.0}},
            "stages": {"sms": {"date": "2026-11-19"}},
            "policies": {"crowd": {"half": [{"seconds": 8.0, "models": {"vgg19": {
                "answered_per_s": 805.0, "p50_ms": 4.0, "within_slo": 0.987, "failed": {"door": 2, "late": 1}, "share_percent": 50}}}]}},
            "mixes": {"mix": {"half": [{"seconds": 8.0, "models": {
                "bert-base": {"offered": 800, "within_slo": 0.5, "counted_within_slo": 0.75},
                "vgg19": {"offered": 80, "within_slo": 1.0}}}]}},
            "failed": {"pairs": "it\nbroke"},
        });
        let page = page(&figures);
        assert!(page.contains("NVIDIA H200, driver 580, MPS: -"));
        assert!(page.contains("1-2 %: 8; 10 %: 12"));
        assert!(page.contains("| resnet50 | 20.5 | - | - | - | - | - | 3000 |"));
        assert!(page.contains("combined. Measured 2026-11-19. `make"));
        assert!(page.contains("| half, 1: 8 s | vgg19 | 805 | 4 | - | - | 98.7 | - | 3 | 50 |"));
        assert!(page.contains("| policy, span | within SLO/s | bert-base | vgg19 |"));
        assert!(page.contains("| half, 1 | 60 | 50.0 (75.0), -, - | 100.0 (-), -, - |"));
        assert!(page.contains("Stage pairs failed**: it broke"));
        assert_eq!(page.matches("**Missing**").count(), SECTIONS.len() - 4);
        assert!(!page.contains("rehearsal"));
    }
}
