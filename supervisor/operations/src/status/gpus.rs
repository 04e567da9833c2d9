//! The status of GPUs, and of the memory that workers use on these GPUs.

use serde::{Deserialize, Serialize};

use super::GpuStatus;
use shadowslice_control::backend::{BackendKind, gib};
use shadowslice_control::controller::{ReportedRole, WorkerReport};
use shadowslice_control::nvml::{Memory, Reading};

pub(crate) const MIB: u64 = 1 << 20;

/// The readings of a GPU from NVML. A reading is `None` if NVML does not provide it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NvmlStatus {
    /// The UUID in the form `GPU-...`.
    pub uuid: String,
    pub name: String,
    pub memory: Option<GpuMemory>,
    /// The percentage of the last sampling period in which at least one kernel ran, regardless of
    /// the number of SMs.
    pub utilisation_percent: Option<u32>,
    pub power_mw: Option<u32>,
    pub power_limit_mw: Option<u32>,
    /// The energy that the GPU has used since the driver was loaded, in mJ.
    pub energy_mj: Option<u64>,
    /// The number of XID errors that the driver has reported since the supervisor started.
    pub xid_errors: u64,
}

/// The memory of a GPU, in MiB. The driver's own memory counts neither as used nor as free.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuMemory {
    pub used_mib: u64,
    pub free_mib: u64,
    pub total_mib: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerStatus {
    #[serde(flatten)]
    pub report: WorkerReport,
    /// The GPU memory of the process or, in a shared worker, of the model, in MiB. `None` on an emulated GPU, and if NVML does not
    /// provide it.
    pub memory_mib: Option<u64>,
}

pub(super) fn of_workers(workers: &[WorkerReport], gpu: Option<&Reading>) -> Vec<WorkerStatus> {
    let usage = gpu.and_then(|gpu| gpu.usage.as_ref());
    let status = |worker: &WorkerReport| WorkerStatus {
        report: worker.clone(),
        memory_mib: usage.and_then(|usage| worker.gpu_bytes(usage)).map(|bytes| bytes / MIB),
    };
    workers.iter().map(status).collect()
}

/// Returns a message if the GPU has too little memory for another worker of a model with these
/// workers. The new worker is assumed to need as much memory as the serving worker uses without its
/// weights. If this amount is unknown, the new worker is assumed to need `need` bytes. A standby's
/// memory counts as free, because the standby would be stopped.
pub(super) fn no_room(workers: &[WorkerReport], need: Option<u64>, gpu: Option<&Reading>) -> Option<String> {
    let usage = gpu?.usage.as_ref()?;
    let of = |role| workers.iter().find(|worker| worker.role == role);
    let bytes = |role| of(role).and_then(|worker| worker.gpu_bytes(usage));
    // The new worker shares the weights that the incumbent has loaded onto the GPU.
    let brought = of(ReportedRole::Incumbent)
        .and_then(|worker| worker.memory)
        .map_or(0, |memory| memory.brought_mib * MIB);
    let needed = bytes(ReportedRole::Incumbent).map(|bytes| bytes.saturating_sub(brought)).or(need)?;
    let free = usage.memory.free.saturating_add(bytes(ReportedRole::Standby).unwrap_or(0));
    (needed > free)
        .then(|| format!("a second worker needs {} of GPU memory, and {} are free", gib(needed), gib(free)))
}

/// Returns the problems of a GPU.
pub(crate) fn notes(gpu: &GpuStatus) -> Vec<String> {
    let none = (gpu.backend == BackendKind::None)
        .then(|| format!("GPU {}: no share is enforced (`partition: none`)", gpu.device));
    let why = gpu.why.as_ref().map(|why| format!("GPU {} accepts no workers: {why}", gpu.device));
    [none, why].into_iter().flatten().collect()
}

pub(super) fn line(gpu: &GpuStatus) -> Option<String> {
    let NvmlStatus { name, memory, utilisation_percent, xid_errors, .. } = gpu.nvml.as_ref()?;
    let memory = memory.map_or("memory unknown".to_owned(), |GpuMemory { used_mib, total_mib, .. }| {
        format!("{used_mib} of {total_mib} MiB used")
    });
    let busy =
        utilisation_percent.map(|percent| format!(", busy {percent}% of the time")).unwrap_or_default();
    let errors = match xid_errors {
        0 => String::new(),
        count => format!(", {count} errors reported by the driver (XID; see the log)"),
    };
    Some(format!("GPU {} ({name}): {memory}{busy}{errors}", gpu.device))
}

pub(super) fn of_reading(reading: &Reading) -> NvmlStatus {
    let usage = reading.usage.as_ref();
    let power = usage.map(|usage| usage.power).unwrap_or_default();
    NvmlStatus {
        uuid: reading.identity.uuid.clone(),
        name: reading.identity.name.clone(),
        memory: usage.map(|usage| in_mib(usage.memory)),
        utilisation_percent: usage.and_then(|usage| usage.utilisation_percent),
        power_mw: power.draw_mw,
        power_limit_mw: power.limit_mw,
        energy_mj: power.energy_mj,
        xid_errors: reading.xid_errors,
    }
}

fn in_mib(Memory { used, free, total }: Memory) -> GpuMemory {
    GpuMemory { used_mib: used / MIB, free_mib: free / MIB, total_mib: total / MIB }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowslice_control::controller::{ReportedPhase, WorkerMemory};
    use shadowslice_control::nvml::{GpuProcess, Identity, Power, Usage};

    fn reading(usage: Option<Usage>) -> Reading {
        let identity = Identity { index: 3, uuid: "GPU-5a7c".to_owned(), name: "NVIDIA H200".to_owned() };
        Reading { identity, usage, read_at: std::time::Instant::now(), xid_errors: 2 }
    }

    fn gpu(nvml: Option<NvmlStatus>) -> GpuStatus {
        GpuStatus {
            index: 1,
            device: "3".to_owned(),
            uuid: None,
            backend: BackendKind::Mps,
            sms: 132,
            sm_seconds: 0.0,
            groups: None,
            no_partitions: None,
            mps_server_pid: None,
            why: None,
            nvml,
        }
    }

    fn usage() -> Usage {
        Usage {
            memory: Memory { used: 900 * MIB + 7, free: 1000 * MIB, total: 2048 * MIB },
            utilisation_percent: Some(37),
            power: Power { draw_mw: Some(120_500), limit_mw: Some(700_000), energy_mj: None },
            processes: vec![GpuProcess { pid: 7, bytes: Some(438 * MIB) }],
        }
    }

    fn worker(pid: i32) -> WorkerReport {
        WorkerReport {
            role: ReportedRole::Incumbent,
            pid,
            shared: None,
            share_percent: 30,
            sms: 38,
            phase: ReportedPhase::Serving,
            restarts: 0,
            boot_ms: Default::default(),
            answer_error: Default::default(),
            memory: None,
        }
    }

    #[test]
    fn a_gpu_shows_its_memory_unless_nvml_does_not_know_it() {
        let nvml = of_reading(&reading(Some(usage())));
        let json = serde_json::json!({
            "uuid": "GPU-5a7c", "name": "NVIDIA H200", "utilisation_percent": 37, "xid_errors": 2,
            "power_mw": 120_500, "power_limit_mw": 700_000, "energy_mj": null,
            "memory": {"used_mib": 900, "free_mib": 1000, "total_mib": 2048}
        });
        assert_eq!(serde_json::to_value(&nvml).unwrap(), json);
        let line = line(&gpu(Some(nvml))).unwrap();
        let expected = "GPU 3 (NVIDIA H200): 900 of 2048 MiB used, busy 37% of the time, 2 errors";
        assert!(line.starts_with(expected), "{line}");
        assert_eq!(super::line(&gpu(None)), None);
    }

    #[test]
    fn a_lost_gpu_still_shows_its_errors() {
        let nvml = of_reading(&reading(None));
        assert_eq!((nvml.memory, nvml.utilisation_percent, nvml.xid_errors), (None, None, 2));
        assert!(line(&gpu(Some(nvml))).unwrap().contains("memory unknown, 2 errors"));
    }

    #[test]
    fn a_worker_has_the_memory_of_its_process_and_no_other() {
        let memory = |gpu: Option<&Reading>| -> Vec<_> {
            of_workers(&[worker(7), worker(8)], gpu).iter().map(|worker| worker.memory_mib).collect()
        };
        assert_eq!(memory(Some(&reading(Some(usage())))), [Some(438), None]);
        assert_eq!(memory(Some(&reading(None))), [None, None]);
        assert_eq!(memory(None), [None, None]);
        let json = serde_json::to_value(&of_workers(&[worker(7)], Some(&reading(Some(usage()))))[0]).unwrap();
        assert_eq!((&json["pid"], &json["memory_mib"]), (&7.into(), &438.into()));
    }

    #[test]
    fn a_model_without_room_for_a_shadow_has_a_reason() {
        let usage = |free: u64, standby: Option<u64>| Usage {
            memory: Memory { used: 0, free: free << 30, total: 0 },
            utilisation_percent: None,
            power: Power::default(),
            processes: vec![
                GpuProcess { pid: 7, bytes: Some(9 << 30) },
                GpuProcess { pid: 8, bytes: standby.map(|gib| gib << 30) },
            ],
        };
        let standby = WorkerReport { role: ReportedRole::Standby, ..worker(8) };
        let why = |workers: &[WorkerReport], need, usage| no_room(workers, need, Some(&reading(Some(usage))));
        let too_little = "a second worker needs 9.0 GiB of GPU memory, and 4.0 GiB are free";
        assert_eq!(why(&[worker(7)], None, usage(4, None)).as_deref(), Some(too_little));
        assert_eq!(why(&[worker(7)], None, usage(9, None)), None);
        let brought = WorkerMemory { weights_mib: 5 << 10, brought_mib: 5 << 10, scratch_mib: 0 };
        let first = WorkerReport { memory: Some(brought), ..worker(7) };
        assert_eq!(why(&[first], None, usage(4, None)), None, "the weights are loaded already");
        assert_eq!(why(&[worker(7), standby], None, usage(4, Some(5))), None, "the standby would stop");
        assert_eq!(
            why(&[worker(9)], Some(9 << 30), usage(4, None)).as_deref(),
            Some(too_little),
            "the need comes from the profile"
        );
        assert_eq!(why(&[worker(9)], None, usage(0, None)), None, "the need is unknown");
        assert_eq!(no_room(&[worker(7)], Some(9 << 30), Some(&reading(None))), None);
    }
}
