//! Xid errors, which are the numbers with which NVIDIA's driver reports faults of a GPU.

pub(super) fn meaning(xid: u64) -> &'static str {
    match xid {
        13 => "a kernel performed an illegal operation",
        31 => "a kernel accessed memory that does not belong to its process",
        43 => "the driver stopped a process's work after an error in that work",
        45 => "the driver removed a process's work, after an error or because the process exited",
        48 => "faulty memory (double-bit error); reset the GPU",
        63 | 64 => "spare memory replaced faulty memory; reset the GPU soon",
        74 => "a link to another GPU failed",
        79 => "the GPU has fallen off the bus; restart the host",
        94 => "faulty memory (contained error); the driver ends the processes that used the memory",
        95 => "faulty memory (uncontained error); reset the GPU",
        119 | 120 => "the GPU's system processor (GSP) does not respond; reset the GPU",
        _ => "see NVIDIA's catalogue of XID errors",
    }
}
