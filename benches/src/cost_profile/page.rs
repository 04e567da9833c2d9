//! The counts as a page.

use crate::cost_profile::callgrind::{CallgrindProfile, FunctionCost};
use crate::cost_profile::context_switches::ContextSwitches;
use crate::cost_profile::kernel_counts::KernelCounts;
use crate::cost_profile::{MissingTools, SettingCounts};
use crate::machine::HostInfo;
use crate::table;

/// How many functions a list shows.
const FUNCTIONS: usize = 30;

/// The settings with a list of functions.
const LISTED: [&str; 2] = ["http unix 64 B x8", "http unix 600000 B x8"];

/// The whole page.
pub(super) fn of(counts: &[SettingCounts], missing: &MissingTools) -> String {
    let HostInfo { cpu, cores, kernel, date, .. } = HostInfo::here();
    let left_out: String = [&missing.calls, &missing.profile]
        .into_iter()
        .flatten()
        .map(|reason| format!("\nLeft out, because {reason}.\n"))
        .collect();
    format!(
        "# What a request costs, counted

What supervisor and worker do for one echo request, counted instead of timed, so that a busy machine matters little. `make cost-profile` writes this page;
nothing here is written by hand. {METHODS}

{cpu}, {cores} cores that hold supervisor, worker and client, Linux {kernel}, no GPU, emulated engine. {date}.
{left_out}
{}",
        tables(counts)
    )
}

const METHODS: &str = "The load is that of `make bench`'s echo: each connection sends a request, waits for its answer, checks every byte, sends the next. Each setting \
has a server of its own with one model. Clients connect and warm up first, then a known number of requests is counted, so start-up does not count; what \
an idle server does meanwhile does.

* **system calls**, **wake-ups** (sleeping threads that the process woke, its own and others') and **page faults** are counted in the kernel by `perf stat` at tracepoints, attached \
to the warm process. Unlike `strace`, which stops a thread twice at every call, that leaves batches and wake-ups about as they are. It takes root.
* **voluntary** and **involuntary** context switches are those of `/proc/PID/task/*/status`, over as many requests without perf. Voluntary: the thread slept. Involuntary: it was preempted, \
which depends on which other programs want the cores, and is to be compared within one run at most.
* **instructions**, **allocations**, **releases** and **copies** come from Valgrind's Callgrind, switched on once all is warm, over fewer requests. It runs threads in turns and some 40 times slower, so it sees \
no contention, and batches differ from those at full speed. It sees user space only, and only the supervisor: the worker does not start under Valgrind 3.19 \
(rustix asks the kernel for the vDSO, which Valgrind hides). Allocations are calls of the allocator's functions (the C library's or jemalloc's) from outside the allocator; a `realloc` \
counts. It does not see their sizes.
* **copies** are calls of `memcpy` and `memmove`; short ones that the compiler wrote in place are not seen. Callgrind does not see their sizes. But from some kilobytes on the C library \
copies with one `rep movsb`, which counts as one instruction a byte: for a large tensor, **instructions in copies** over the tensor's bytes is how often it is copied.
* **locks**: the pipeline's mutex is taken by one instruction in place that no counter sees. A lock that is not free at once ends in `futex` when its thread sleeps; so do tokio's idle \
threads. Callgrind would show `lock_slow`, which is **slow locks**.";

/// All figures.
pub(super) fn tables(counts: &[SettingCounts]) -> String {
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

/// A process's part of a count.
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
    // The builds of a setting next to each other, process by process.
    let mut rows = Vec::new();
    for setting in counts.chunk_by(|one, next| one.setting == next.setting) {
        for process in 0..2 {
            rows.extend(setting.iter().map(|count| row(count, &parts(count)[process])));
        }
    }
    table(&heads, rows.into_iter())
}

fn row(count: &SettingCounts, part: &ProcessCounts<'_>) -> Vec<String> {
    let each = |number: u64| hundredths(number, count.requests);
    let name = count.setting.to_string();
    let mut cells = vec![
        name.trim_start_matches("shadowslice ").to_owned(),
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
        let CallgrindProfile { instructions, copying, allocations, releases, copies, contended, .. } =
            profile;
        cells.extend([instructions, copying].map(|number| whole(*number, requests)));
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
            // An event that happens less than once in two hundred requests is shown as nothing.
            let names = names.into_iter().filter(|(_, number)| number * 200 >= count.requests);
            let text: Vec<String> = names
                .map(|(name, number)| format!("{name} {}", hundredths(number, count.requests)))
                .collect();
            let setting = count.setting.to_string();
            let setting = setting.trim_start_matches("shadowslice ").to_owned();
            rows.push(vec![setting, process.to_owned(), count.build.clone(), text.join(", ")]);
        }
    }
    table(&["setting", "process", "build", "system calls"], rows.into_iter())
}

/// The functions with a profile's instructions, and the functions that allocate memory.
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
        profile.top(FUNCTIONS, key).into_iter().map(of).collect::<Vec<_>>().into_iter()
    };
    let heads = ["function", "calls", "with what it calls", "itself"];
    let callers = profile
        .top_allocating(FUNCTIONS)
        .into_iter()
        .map(|(name, calls)| vec![format!("`{name}`"), hundredths(calls, requests)]);
    let setting = count.setting.to_string();
    format!(
        "\n## {}, {}: where the supervisor's instructions go\n\nPer request.\n\n{}\nBy their own instructions:\n\n{}\n\
         Functions that ask for memory (what the compiler put into its caller shows as the caller):\n\n{}",
        setting.trim_start_matches("shadowslice "),
        count.build,
        table(&heads, rows(|function| function.inclusive)),
        table(&heads, rows(|function| function.itself)),
        table(&["function", "allocations"], callers)
    )
}

fn hundredths(number: u64, requests: u64) -> String {
    format!("{:.2}", number as f64 / requests as f64)
}

fn whole(number: u64, requests: u64) -> String {
    format!("{:.0}", number as f64 / requests as f64)
}
