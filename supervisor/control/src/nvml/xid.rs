//! XID errors: the numbers under which NVIDIA's driver reports what went wrong on a GPU.

pub(super) fn meaning(xid: u64) -> &'static str {
    match xid {
        13 => "a kernel did something illegal",
        31 => "a kernel used memory that is not its process's",
        43 => "a process's work was stopped after an error of its own",
        45 => "a process's work was removed, after an error or because it ended",
        48 => "memory is broken (double bit error); the GPU must be reset",
        63 | 64 => "broken memory was replaced by spare; the GPU should be reset soon",
        74 => "a link to another GPU failed",
        79 => "the GPU has fallen off the bus; the host must be restarted",
        94 => "memory is broken (contained); the processes that used it are ended",
        95 => "memory is broken (not contained); the GPU must be reset",
        119 | 120 => "the GPU's own processor does not answer; the GPU must be reset",
        _ => "see NVIDIA's catalogue of XID errors",
    }
}
