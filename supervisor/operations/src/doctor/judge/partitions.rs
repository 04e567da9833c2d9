//! Shares that change inside the worker, and the needs of half precision for that.

use crate::doctor::check::Check;
use crate::doctor::facts::{DriverFacts, PartitionMeasurement};
use shadowslice_control::nvml::CudaVersion;

/// From this version of CUDA on the driver divides a GPU's SMs inside a process.
const LEAST_CUDA: CudaVersion = CudaVersion { major: 12, minor: 4 };

/// Hopper's compute capability, on which half precision was found wrong at a percentage.
const HOPPER: (i32, i32) = (9, 0);

pub(super) fn checks(measured: Option<&[PartitionMeasurement]>, driver: &DriverFacts) -> Vec<Check> {
    let Ok(host) = &driver.nvml else { return Vec::new() };
    let mut checks = match measured {
        Some(measured) => measured.iter().map(of_gpu).collect(),
        None if host.cuda < LEAST_CUDA => vec![Check::warning(
            "partitions",
            format!("the driver speaks CUDA {}, and shares inside a worker need {LEAST_CUDA}", host.cuda),
            "update the driver; until then shares change by shadow workers",
        )],
        None => vec![Check::ok(
            "partitions",
            "the driver can divide the SMs inside a process; `shadowslice doctor --partitions` measures \
             whether they keep apart",
        )],
    };
    if host.gpus.iter().flatten().any(|gpu| gpu.capability == HOPPER) {
        checks.push(Check::ok(
            "half precision",
            "wrong at an MPS percentage below 100 % on this GPU (cuBLAS), right with `handover: in-process`; \
             workers that answer wrongly are refused",
        ));
    }
    checks
}

fn of_gpu(PartitionMeasurement { device, groups }: &PartitionMeasurement) -> Check {
    let name = format!("partitions of GPU {device}");
    match groups {
        Ok(Ok(sizes)) => {
            let sms: u32 = sizes.iter().sum();
            Check::ok(name, format!("{} groups of {sms} SMs keep apart in two processes", sizes.len()))
        }
        Ok(Err(why)) => Check::warning(
            name,
            format!("none: {why}"),
            "shares change by shadow workers; half precision needs a share of 100 %",
        ),
        Err(trouble) => Check::met(name, trouble),
    }
}
