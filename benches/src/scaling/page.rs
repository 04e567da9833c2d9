//! The page with the results of the scaling benchmark.

use std::time::Duration;

use crate::report::{Report, number, table};
use crate::scaling::ScalingResults;
use crate::scaling::idle::IdleCost;

pub(super) fn report(found: &ScalingResults, name: Option<&str>) -> Report {
    let parts = [
        (!found.sweep.is_empty()).then(|| sweep(found)),
        (!found.memory.is_empty()).then(|| memory(found)),
        (!found.idle.is_empty()).then(|| idle(&found.idle)),
    ];
    Report {
        title: "Scaling",
        about: ABOUT.to_owned(),
        processes: "supervisor, workers and client",
        method: name.map(|name| format!("The measured build is {name}.")).unwrap_or_default(),
        results: parts.into_iter().flatten().collect::<Vec<_>>().join("\n"),
    }
}

const ABOUT: &str = "\
How costs grow with the numbers of models, connections and requests and the size of tensors. `make scaling` writes this page; do not edit it. \
The load is the echo load of `make bench`, over Unix sockets, with models that answer at once. For large tensors the limits are raised \
(`limits.request_bytes`, `limits.response_bytes`, `queue.memory`).";

fn sweep(found: &ScalingResults) -> String {
    let rows = found.sweep.iter().map(|row| {
        let round = &row.round;
        vec![
            row.variable.to_owned(),
            row.setting.load(),
            row.models.to_string(),
            number(round.requests_per_second, 0),
            number(round.p50_us, 0),
            number(round.p99_us, 0),
            number(round.server_cpu_us(), 1),
            format!("{:.1} + {:.1}", round.supervisor_cpu_us, round.worker_cpu_us),
            number(round.client_cpu_us, 1),
            mib(row.memory.rss),
            mib(row.memory.anonymous),
            number(round.others_percent, 0),
        ]
    });
    let heads = [
        "variable",
        "setting",
        "models",
        "requests/s",
        "p50 us",
        "p99 us",
        "server CPU us",
        "supervisor + worker",
        "client CPU us",
        "RSS MiB",
        "anonymous MiB",
        "others %",
    ];
    format!(
        "## Models, connections, tensors\n\nEach row has a new supervisor. CPU time is per request. Memory is the supervisor's memory after the last round. With several models, 100 \
         connections each use one of them. Anonymous memory is private to the supervisor. The rest of RSS is the binary and the request slabs. Slabs keep \
         pages that they have used (`queue.memory` bounds them).\n\n{}",
        table(&heads, rows)
    )
}

fn memory(found: &ScalingResults) -> String {
    let rows = found.memory.iter().map(|row| {
        let memory = row.memory;
        let mut cells = vec![row.load.to_owned(), row.after.clone()];
        cells.extend([memory.rss, memory.pss, memory.anonymous].map(mib));
        cells.push(row.files.to_string());
        cells
    });
    let heads = ["load over HTTP", "after", "RSS MiB", "PSS MiB", "anonymous MiB", "open files"];
    format!(
        "## Memory of the supervisor over many requests\n\nThe figures come from `/proc/PID/smaps_rollup`.\n\n{}",
        table(&heads, rows)
    )
}

fn idle(found: &[IdleCost]) -> String {
    let rows = found.iter().flat_map(|idle| {
        let seconds = idle.span.as_secs_f64();
        let row = move |process: &str, cpu: Duration, switches: u64| {
            let per_mille = cpu.as_secs_f64() * 1e3 / seconds;
            vec![
                idle.policy.to_owned(),
                process.to_owned(),
                number(per_mille, 2),
                number(per_mille / 10.0, 3),
                number(switches as f64 / seconds, 1),
                number(idle.others_percent, 0),
            ]
        };
        let IdleCost { cpu, switches, .. } = idle;
        [
            row("supervisor", cpu.supervisor, switches.supervisor),
            row("all workers", cpu.worker, switches.worker),
        ]
    });
    let heads = ["policy", "process", "CPU ms/s", "% of a core", "voluntary context switches/s", "others %"];
    let (models, seconds) = found.first().map_or((0, 0.0), |idle| (idle.models, idle.span.as_secs_f64()));
    format!("## Idle\n\n{models} models without requests, over {seconds:.0} s.\n\n{}", table(&heads, rows))
}

fn mib(kib: u64) -> String {
    number(kib as f64 / 1024.0, 1)
}
