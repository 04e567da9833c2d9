//! The page: the figures as tables, with the meaning of each figure and the command that took it.
//! Missing figures are reported as missing.

mod brief;
mod contention;
mod partitions;
mod policies;
mod table;

use std::fmt::Write;

use serde_json::Value;

pub(crate) use brief::{brief, rows as brief_rows};
use table::{Table, cell};

/// A part of the page.
struct Section {
    title: &'static str,
    /// The stage that takes its figures.
    stage: &'static str,
    /// The figure without which there is nothing to show.
    figure: &'static str,
    means: &'static str,
    show: fn(&Value) -> String,
}

/// All parts, in order.
const SECTIONS: &[Section] = &[
    Section {
        title: "From percent to SMs",
        stage: "sms",
        figure: "sms_by_percent",
        means: "SMs that a process may use under MPS at a percentage of active threads, read back from the device; \
                percentages in a row that come to the same are taken together.",
        show: sms,
    },
    Section {
        title: "Contexts",
        stage: "sms",
        figure: "context_ms",
        means: "What a process pays before it loads anything: initialising CUDA and making its context under MPS (ms; one figure \
                where they are not told apart).",
        show: contexts,
    },
    Section {
        title: "Where the time of a hand-over goes",
        stage: "handover",
        figure: "handover_ms",
        means: "Medians in ms over hand-overs between 30 % and 60 % under light load, one model at a time, batches up to 8. `effect`: \
                from the order to the first batch done at the new share; requests are served all along.",
        show: |figures| matrix(figures, "handover_ms", &HANDOVER_PARTS),
    },
    Section {
        title: "Stall",
        stage: "handover",
        figure: "stall_us",
        means: "The longest time within a hand-over in which a batch was ready, a slot free, and no worker took it, in us, over all \
                hand-overs of the stages handover and lossless.",
        show: |figures| samples(figures, &[("stall", &["stall_us"])]),
    },
    Section {
        title: "Memory",
        stage: "memory",
        figure: "memory",
        means: "GPU memory of the whole card in MiB beyond its idle state, batches up to 32, one model at a time: with one worker, \
                with two, before and after the deaths of all workers and of the MPS server under 50 requests/s, and after the end. \
                `effect`: from the order to the first batch at the new share, in ms.",
        show: crate::memory::show,
    },
    Section {
        title: "Hand-overs under load",
        stage: "lossless",
        figure: "handovers",
        means: "All models at once, each at half of what it carries while all are saturated, handed over between 30 % and 45 % again and \
                again. Every answer is compared with the first one to the same input, within 2 % of its largest value. The twin \
                run has the first parts of the same arrivals, and no hand-overs.",
        show: handovers,
    },
    Section {
        title: "Shares that change inside the worker",
        stage: "partitions",
        figure: "partitions",
        means: "All models at once, each at half of what it carries while all are saturated, each changed every 100 ms: between two \
                shares whose partitions the worker has ready, and between six, of which it has not. `in force`: from the order to its \
                answer, after which the next batch runs there, in ms. The twin run has no changes. Then a model of 150 requests/s on \
                20 % beside one that never rests: alone, on other groups of SMs, and both on all.",
        show: partitions::show,
    },
    Section {
        title: "Contention",
        stage: "contention",
        figure: "contention",
        means: "The mean latency of one request at a time, in ms, beside a model that never rests, by the shares of both; both have \
                partitions, which overlap where they do not fit. `alone`: the same while the other rests.",
        show: contention::show,
    },
    Section {
        title: "What a warming shadow costs",
        stage: "neighbours",
        figure: "neighbour_p99_ratio",
        means: "p99 of requests under way while a shadow of the model starts, loads and warms up, over p99 of the same load without \
                hand-overs: of the model itself, and the worst of the other models. All at half of what they carry.",
        show: |figures| matrix(figures, "neighbour_p99_ratio", &["incumbent", "neighbours", "warming_s"]),
    },
    Section {
        title: "Execution times",
        stage: "profiles",
        figure: "profiles",
        means: "How long a batch executes in ms, alone on the GPU, by SMs (rows of the table) and batch size: medians of `shadowslice \
                profile`. The same tables are in configs/profiles.",
        show: execution,
    },
    Section {
        title: "Memory of a shadow",
        stage: "sweep",
        figure: "shadow_memory_mib",
        means: "GPU memory in MiB that a worker takes at 30 %, batches up to 32, as nvidia-smi says: its context (measured alone), its \
                weights (the file's size), and the rest, which is activations and workspaces.",
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
        means: "Throughput of the row's model alone at 50 %, over its throughput beside the column's model, also at 50 %; both closed-loop \
                with batches of 8, as their clients see it, so the host's part is in it.",
        show: |figures| square(figures, "pair_slowdown"),
    },
    Section {
        title: "Pairs: execution",
        stage: "pairs",
        figure: "pair_execution_slowdown",
        means: "The same, of the time that a batch executes: the GPU's part alone.",
        show: |figures| square(figures, "pair_execution_slowdown"),
    },
    Section {
        title: "Policies",
        stage: "policies",
        figure: "policies",
        means: "The same loads under `controller.policy` as named, by the profiles above, batches up to 16, nothing said of shares; in spans, one \
                after the other (tests/gpu/mixes/small.yaml). *crowd*: ResNet-50 (SLO 15 ms, priority 1), BERT base (40 ms, 2) and VGG-19 (100 ms, 3), each asked by four \
                clients that ask again as soon as they are answered. *hog*: ResNet-50 with the SLO named and priority 1 gets 300 requests a \
                second at random times, or 20 with 5 ms (*seldom*), beside VGG-19 (100 ms, 3) with 24 such clients. *peers*: BERT base (8 ms, 1) gets \
                40 a second and ResNet-50 (15 ms, 1) 800 beside the same VGG-19; *by hand*: with 40, 20 and 40 % of the GPU. *step*: \
                ResNet-50 alone gets 30 a second, then 800. \
                Latencies are the clients', over gRPC on a Unix socket, in open loop from the scheduled arrival; the supervisor counts \
                from when it has the request to when it has the answer. What is refused or failed is not within the SLO.",
        show: policies::policies,
    },
    Section {
        title: "Policies with more models",
        stage: "mixes",
        figure: "mixes",
        means: "The same with five models or more at once (tests/gpu/mixes/five.yaml, or the files of `--mixes`), by clients that ask \
                at random times. First a line for each span: requests of all models and of those with the highest priority that their \
                clients had within the SLO, in %; the same of requests that were due 3 s or more after the span's start, and before that; \
                what the supervisor counts; requests that were refused or failed, in %; changes of shares; how late the clients sent \
                requests, in ms (p99 and the most of any model); busy cores of the host and of the clients. Then each model: the part \
                that its clients had within the SLO (as the supervisor counts), p50 and p99 in ms.",
        show: policies::mixes,
    },
    Section {
        title: "Two GPUs",
        stage: "gpus",
        figure: "gpus",
        means: "The same two models on each of a host's first two GPUs, under one supervisor. Rows a second of each GPU alone and of both at \
                once, with batches of 8; then all models at half of what they carry, while those of the second GPU are handed over, and its MPS \
                server is killed. p99 in ms before, during the hand-overs, and from the kill to the return of the second GPU's models.",
        show: gpus,
    },
];

const HANDOVER_PARTS: [&str; 7] = ["spawn", "libraries", "context", "session", "warmup", "proof", "effect"];

/// The page for these figures.
pub(crate) fn page(figures: &Value) -> String {
    let mut text = String::from("# GPU check\n\n");
    let mut line = |said: String| writeln!(text, "{said}").expect("a string takes everything");
    if let Some(what) = figures["rehearsal"].as_str() {
        line(format!("**A rehearsal** {what}.\n"));
    }
    line(format!(
        "{}, driver {}, MPS: {}; {} cores, {}; last taken {}, by `make gpu-check`; figures for programs: gpu.json.\n",
        cell(&figures["device"]),
        cell(&figures["driver"]),
        cell(&figures["mps"]),
        cell(&figures["host"]["cores"]),
        cell(&figures["host"]["system"]),
        cell(&figures["date"]),
    ));
    line(
        "Models have the published networks' shapes and random weights (models/make_gpu_models.py), FP32.\n"
            .into(),
    );
    for (stage, why) in figures["failed"].as_object().into_iter().flatten() {
        line(format!("* **Stage {stage} failed**: {}", why.as_str().unwrap_or("?").replace('\n', " ")));
    }
    for Section { title, stage, figure, means, show } in SECTIONS {
        let there = figures.get(*figure).is_some_and(|value| !value.is_null());
        let body = if there { show(figures) } else { "**Missing**: not measured.\n".into() };
        let taken = &figures["stages"][*stage]["date"];
        let taken = if taken.is_null() { String::new() } else { format!(" Taken {}.", cell(taken)) };
        line(format!(
            "\n## {title}\n\n{means}{taken} `make gpu-check GPU_CHECK_ARGS=\"--stages {stage}\"`\n\n{}",
            body.trim_end()
        ));
    }
    text.trim_end().to_owned() + "\n"
}

/// Percentages in a row with the same SMs, as one cell.
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

/// Quantiles, a row a sample.
fn samples(figures: &Value, rows: &[(&str, &[&str])]) -> String {
    let mut table = Table::new(&["", "p50", "p99", "max", "count"]);
    for (name, path) in rows {
        let sample = path.iter().fold(figures, |tree, key| &tree[*key]);
        table.row(name, ["p50", "p99", "max", "count"].iter().map(|key| cell(&sample[*key])));
    }
    table.text()
}

/// A row a model, a column a part.
pub(crate) fn matrix(figures: &Value, figure: &str, parts: &[&str]) -> String {
    let mut table = Table::new(&[&["model"], parts].concat());
    for (model, of) in figures[figure].as_object().into_iter().flatten() {
        table.row(model, parts.iter().map(|part| cell(&of[*part])));
    }
    table.text()
}

/// A row and a column a model.
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
        "{} hand-overs done, {} not; {} requests offered, {} lost, {} wrong.\n\n",
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
        return "**Missing**: the host has one GPU.\n".into();
    }
    let alone = all["alone_rows_per_s"].as_array().into_iter().flatten();
    let mut text = format!(
        "Alone {} rows/s, together {}: {} of the sum. {} hand-overs; back after {} s.\n\n",
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

/// A small number with two digits.
fn small(value: &Value) -> String {
    value.as_f64().map_or_else(|| cell(value), |number| format!("{number:.1e}"))
}

/// The keys of a map, by the number that each is.
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
    fn says_what_is_there_and_what_is_missing() {
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
        assert!(page.contains("together. Taken 2026-11-19. `make"));
        assert!(page.contains("| half, 1: 8 s | vgg19 | 805 | 4 | - | - | 98.7 | - | 3 | 50 |"));
        assert!(page.contains("| policy, span | within SLO/s | bert-base | vgg19 |"));
        assert!(page.contains("| half, 1 | 60 | 50.0 (75.0), -, - | 100.0 (-), -, - |"));
        assert!(page.contains("Stage pairs failed**: it broke"));
        assert_eq!(page.matches("**Missing**").count(), SECTIONS.len() - 4);
        assert!(!page.contains("rehearsal"));
    }
}
