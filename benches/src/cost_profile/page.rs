//! The page with the cost profile.

use crate::cost_profile::callgrind::{CallgrindProfile, FunctionCost};
use crate::cost_profile::context_switches::ContextSwitches;
use crate::cost_profile::kernel_counts::KernelCounts;
use crate::cost_profile::{MissingTools, SettingCounts};
use crate::report::{Report, number, table};

/// The maximum number of functions in each list of the page.
const FUNCTIONS: usize = 30;

/// The settings for which the page lists functions.
const LISTED: [&str; 2] = ["http unix 64 B x8", "http unix 600000 B x8"];

pub(super) fn report(counts: &[SettingCounts], missing: &MissingTools) -> Report {
    let missing = [&missing.calls, &missing.profile].into_iter().flatten();
    let left_out: Vec<String> = missing.map(|reason| format!("Left out, because {reason}.")).collect();
    Report {
        title: "Cost profile of a request",
        about: format!(
            "The work of supervisor and worker for one echo request, in counts instead of times, so that other load on the machine matters little.
`make cost-profile` writes this page; do not edit it. {METHODS}"
        ),
        processes: "supervisor, worker and client",
        method: left_out.join("\n\n"),
        results: tables(counts),
    }
}

const METHODS: &str = "The load is the echo load of `make bench`: each connection sends a request, waits for its answer, checks every byte, and sends the next. Each setting \
has its own server with one model. Clients connect and warm up first. Then a known number of requests is counted, so the counts exclude start-up. They include \
the background work of an idle server.

* **system calls**, **wake-ups** and **page faults** come from `perf stat` at kernel tracepoints, attached to the warm process. A wake-up is a sleeping thread, of any process, that the \
process woke. `strace` stops a thread twice at every call; perf leaves batches and wake-ups about as they are. perf needs root.
* **voluntary** and **involuntary** context switches come from `/proc/PID/task/*/status`, over as many requests without perf. Voluntary: the thread slept. Involuntary: the thread was preempted. \
The latter depends on other programs, so compare it within one run only.
* **instructions**, **allocations**, **releases** and **copies** come from Valgrind's Callgrind, over fewer requests, after the warm-up. Callgrind runs one thread at a time and about 40 times slower. \
So it sees no contention, and batches differ from those at full speed. It sees user space only, and only the supervisor. An allocation is a call of an allocator function (C library or jemalloc) from outside the allocator, including `realloc`. \
Callgrind does not see the sizes.
* **copies** are calls of `memcpy` and `memmove`, without short copies that the compiler inlines. Callgrind does not see their sizes. From a few kilobytes on, the C library \
copies with `rep movsb`, which counts as one instruction a byte. So for a large tensor, **in copies** divided by the tensor's bytes is the number of times it is copied.
* **slow locks** are calls of `lock_slow`. An uncontended lock of the pipeline's mutex is one inlined instruction that no counter sees. A contended lock ends in `futex` when its thread sleeps, \
and so do tokio's idle threads.";

fn tables(counts: &[SettingCounts]) -> String {
    let mut text = format!("## Per request\n\n{}", summary(counts));
    if counts.iter().any(|count| count.calls.is_some()) {
        text += &format!("\n## System calls by name, per request\n\n{}", by_name(counts));
    }
    for name in LISTED {
        let listed = counts.iter().filter(|count| count.setting.to_string().ends_with(name));
        for count in listed {
            if let Some((requests, profile)) = &count.profile {
                text += &functions(count, *requests, profile);
            }
        }
    }
    text
}

/// The counts of one process, which form a row of the page.
struct ProcessCounts<'c> {
    process: &'static str,
    switches: &'c ContextSwitches,
    calls: Option<&'c KernelCounts>,
    profile: Option<(u64, &'c CallgrindProfile)>,
}

fn parts(count: &SettingCounts) -> [ProcessCounts<'_>; 2] {
    let calls = count.calls.as_ref();
    [
        ProcessCounts {
            process: "supervisor",
            switches: &count.switches.supervisor,
            calls: calls.map(|calls| &calls.supervisor),
            profile: count.profile.as_ref().map(|(requests, profile)| (*requests, profile)),
        },
        ProcessCounts {
            process: "worker",
            switches: &count.switches.worker,
            calls: calls.map(|calls| &calls.worker),
            profile: None,
        },
    ]
}

fn summary(counts: &[SettingCounts]) -> String {
    let mut heads = vec!["setting", "process", "build", "voluntary", "involuntary"];
    let with_calls = counts.iter().any(|count| count.calls.is_some());
    let with_profile = counts.iter().any(|count| count.profile.is_some());
    if with_calls {
        heads.extend(["system calls", "futex", "wake-ups", "page faults"]);
    }
    if with_profile {
        heads.extend(["instructions", "in copies", "allocations", "releases", "copies", "slow locks"]);
    }
    // Rows of the same setting and process are adjacent, so that a reader can easily compare the
    // builds.
    let mut rows = Vec::new();
    for setting in counts.chunk_by(|one, next| one.setting == next.setting) {
        for process in 0..2 {
            rows.extend(setting.iter().map(|count| row(count, &parts(count)[process])));
        }
    }
    table(&heads, rows)
}

fn row(count: &SettingCounts, part: &ProcessCounts<'_>) -> Vec<String> {
    let each = |number: u64| hundredths(number, count.requests);
    let mut cells = vec![
        count.setting.load(),
        part.process.to_owned(),
        count.build.clone(),
        each(part.switches.voluntary),
        each(part.switches.involuntary),
    ];
    if let Some(calls) = part.calls {
        let futex = calls.by_name.get("futex").copied().unwrap_or(0);
        cells.extend([calls.all, futex, calls.wake_ups, calls.faults].map(each));
    }
    if let Some((requests, profile)) = part.profile {
        let CallgrindProfile {
            instructions,
            copy_instructions,
            allocations,
            releases,
            copies,
            contended,
            ..
        } = profile;
        cells.extend([instructions, copy_instructions].map(|number| whole(*number, requests)));
        cells.extend([allocations, releases, copies, contended].map(|number| hundredths(*number, requests)));
    } else if count.profile.is_some() {
        cells.extend(std::iter::repeat_n("-".to_owned(), 6));
    }
    cells
}

fn by_name(counts: &[SettingCounts]) -> String {
    let mut rows = Vec::new();
    for count in counts {
        for ProcessCounts { process, calls, .. } in parts(count) {
            let Some(calls) = calls else { continue };
            let mut names: Vec<(&str, u64)> =
                calls.by_name.iter().map(|(name, number)| (name.as_str(), *number)).collect();
            names.push(("others", calls.others()));
            names.sort_by_key(|(_, number)| std::cmp::Reverse(*number));
            // System calls that occur less than once in 200 requests are omitted, because the page
            // would show them as 0.00.
            let names = names.into_iter().filter(|(_, number)| number * 200 >= count.requests);
            let text: Vec<String> = names
                .map(|(name, number)| format!("{name} {}", hundredths(number, count.requests)))
                .collect();
            rows.push(vec![count.setting.load(), process.to_owned(), count.build.clone(), text.join(", ")]);
        }
    }
    table(&["setting", "process", "build", "system calls"], rows)
}

/// Returns lists of the functions with the most instructions and with the most allocations.
fn functions(count: &SettingCounts, requests: u64, profile: &CallgrindProfile) -> String {
    let rows = |key: fn(&FunctionCost) -> u64| {
        let of = move |(name, function): (&str, FunctionCost)| {
            vec![
                format!("`{name}`"),
                hundredths(function.calls, requests),
                whole(function.inclusive, requests),
                whole(function.itself, requests),
            ]
        };
        profile.top(FUNCTIONS, key).into_iter().map(of).collect::<Vec<_>>()
    };
    let heads = ["function", "calls", "instructions with callees", "own instructions"];
    let callers = profile
        .top_allocating(FUNCTIONS)
        .into_iter()
        .map(|(name, calls)| vec![format!("`{name}`"), hundredths(calls, requests)]);
    format!(
        "\n## {}, {}: the supervisor's functions\n\nPer request, by instructions with called functions:\n\n{}\nBy their own instructions:\n\n{}\n\
         Functions that allocate memory (an inlined function appears as its caller):\n\n{}",
        count.setting.load(),
        count.build,
        table(&heads, rows(|function| function.inclusive)),
        table(&heads, rows(|function| function.itself)),
        table(&["function", "allocations"], callers)
    )
}

fn hundredths(count: u64, requests: u64) -> String {
    number(count as f64 / requests as f64, 2)
}

fn whole(count: u64, requests: u64) -> String {
    number(count as f64 / requests as f64, 0)
}
