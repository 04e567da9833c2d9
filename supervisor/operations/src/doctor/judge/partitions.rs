//! Checks partitions, which allow the share to change inside the worker, and half precision.

use crate::doctor::check::Check;
use crate::doctor::facts::{DriverFacts, PartitionMeasurement};
use shadowslice_control::nvml::CudaVersion;

/// The first version of CUDA whose driver can divide a GPU's SMs inside a process.
const MIN_CUDA: CudaVersion = CudaVersion { major: 12, minor: 4 };

/// The compute capability of Hopper GPUs. These GPUs compute half precision wrongly if MPS limits
/// the share by a percentage.
const HOPPER: (i32, i32) = (9, 0);

pub(super) fn checks(measured: Option<&[PartitionMeasurement]>, driver: &DriverFacts) -> Vec<Check> {
    let Ok(host) = &driver.nvml else { return Vec::new() };
    let mut checks = match measured {
        Some(measured) => measured.iter().map(of_gpu).collect(),
        None if host.cuda < MIN_CUDA => vec![Check::warning(
            "partitions",
            format!("the driver supports CUDA {}, but partitions inside workers need {MIN_CUDA}", host.cuda),
            "update the driver; until then, shares change by shadow workers",
        )],
        None => vec![Check::ok(
            "partitions",
            "the driver can divide the SMs inside a process; run `shadowslice doctor --partitions` to measure \
             whether partitions are isolated",
        )],
    };
    if host.gpus.iter().flatten().any(|gpu| gpu.capability == HOPPER) {
        checks.push(Check::ok(
            "half precision",
            "wrong at an MPS percentage below 100 % on this GPU (cuBLAS), right with `handover: in-process`; \
             workers with wrong outputs do not serve",
        ));
    }
    checks
}

fn of_gpu(PartitionMeasurement { device, groups }: &PartitionMeasurement) -> Check {
    let name = format!("partitions of GPU {device}");
    match groups {
        Ok(Ok(sizes)) => {
            let sms: u32 = sizes.iter().sum();
            Check::ok(name, format!("{} groups of {sms} SMs are isolated between processes", sizes.len()))
        }
        Ok(Err(why)) => Check::warning(
            name,
            format!("none: {why}"),
            "shares change by shadow workers; give models with half precision a share of 100 %",
        ),
        Err(problem) => Check::of_problem(name, problem),
    }
}
