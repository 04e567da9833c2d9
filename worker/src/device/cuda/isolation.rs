//! A test of partitions in two processes. The partitions must not overlap if they have no group in
//! common, and must overlap if they have all groups in common.
//!
//! One process occupies half of the groups with work that never ends. The other process times a
//! short kernel, first on the other half and then on the occupied half. On the occupied half, the
//! short kernel has to wait for the long kernels.

use std::ffi::CStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::ptr::null_mut;
use std::time::Instant;

use cudarc::driver::{DriverError, result, sys};
use serde::Serialize;
use shadowslice_shared::groups::{Division, Groups};

use super::partition::{DivisionError, PartitionStream, SmGroups};
use super::{CudaError, CudaGpu, cuda_error};

const SAMPLES: usize = 21;

/// The numbers of cycles for which the short kernel and each long kernel spin. These cycles take
/// about 20 us and 3 ms.
const SHORT_CYCLES: u64 = 40_000;
const LONG_CYCLES: u64 = 6_000_000;

/// The number of long kernels in the queue. It is large enough that the GPU has no gap between two
/// kernels.
const QUEUED_KERNELS: usize = 4;

/// The number of threads in a block. Two such blocks fill an SM.
const BLOCK_THREADS: u32 = 1024;

/// A kernel that spins for a number of cycles of the SM's clock.
const SPIN: &CStr = c"
.version 7.0
.target sm_60
.address_size 64
.visible .entry spin(.param .u64 cycles)
{
    .reg .u64 %rd<5>;
    .reg .pred %p;
    ld.param.u64 %rd1, [cycles];
    mov.u64 %rd2, %clock64;
again:
    mov.u64 %rd3, %clock64;
    sub.u64 %rd4, %rd3, %rd2;
    setp.lt.u64 %p, %rd4, %rd1;
    @%p bra again;
    ret;
}
";

#[derive(Debug, thiserror::Error)]
pub enum IsolationError {
    #[error(transparent)]
    DivisionError(#[from] DivisionError),
    #[error("cannot measure the partitions")]
    Gpu(#[from] CudaError),
    #[error("cannot run a second process, which is needed to measure the partitions")]
    Other(#[from] std::io::Error),
}

/// The median times of the short kernel, in us.
#[derive(Debug, Serialize)]
pub struct Isolation {
    pub division: Division,
    /// The time while only this process uses the GPU.
    pub alone_us: f64,
    /// The time while another process occupies the other half.
    pub apart_us: f64,
    /// The time while another process occupies the same half.
    pub together_us: f64,
}

/// Measures the times. `holder` is the command that starts the other process. This function appends
/// the groups to occupy as the last argument.
pub fn measure(gpu: &CudaGpu, mut holder: Command) -> Result<Isolation, IsolationError> {
    let groups = SmGroups::of(gpu)?;
    let division = groups.division().clone();
    let held = Groups::first(division.count() / 2);
    let others: Groups = (0..division.count()).filter(|&group| !held.contains(group)).collect();
    let spin = SpinKernel::load(gpu)?;
    let time = |on: Groups| {
        let stream = groups.stream(on)?;
        let blocks = division.sms(on).0;
        let timed = (0..SAMPLES).map(|_| {
            let begun = Instant::now();
            spin.run(&stream, blocks, SHORT_CYCLES)?;
            spin.finish(&stream)?;
            Ok(begun.elapsed().as_secs_f64() * 1e6)
        });
        let mut timed = timed.collect::<Result<Vec<f64>, CudaError>>()?;
        timed.sort_by(f64::total_cmp);
        Ok::<f64, CudaError>(timed[SAMPLES / 2])
    };
    // The result of the first run is ignored, because the first run is slower than later runs.
    time(others)?;
    let alone_us = time(others)?;
    holder.arg(held.bits().to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
    let holding = HolderProcess::wait_for(holder.spawn()?)?;
    let apart_us = time(others)?;
    let together_us = time(held)?;
    holding.end()?;
    Ok(Isolation { division, alone_us, apart_us, together_us })
}

/// The process that occupies groups until its standard input is closed.
struct HolderProcess(Child);

impl HolderProcess {
    fn wait_for(mut child: Child) -> std::io::Result<Self> {
        let stdout = child.stdout.take().map(BufReader::new);
        let holding = Self(child);
        let mut line = String::new();
        stdout.map(|mut stdout| stdout.read_line(&mut line)).transpose()?;
        let exited = || std::io::Error::other("the process ended before it held its part of the GPU");
        if line.is_empty() { Err(exited()) } else { Ok(holding) }
    }

    fn end(mut self) -> std::io::Result<()> {
        drop(self.0.stdin.take());
        self.0.wait().map(drop)
    }
}

/// Keeps the groups busy until the standard input ends. Writes a line to the standard output once
/// the groups are busy.
pub fn hold(gpu: &CudaGpu, held: Groups) -> Result<(), IsolationError> {
    let groups = SmGroups::of(gpu)?;
    let stream = groups.stream(held)?;
    let spin = SpinKernel::load(gpu)?;
    let blocks = 2 * groups.division().sms(held).0;
    // A read error also ends the process.
    let input = std::thread::spawn(|| std::io::stdin().read_to_end(&mut Vec::new()));
    let marks =
        (0..QUEUED_KERNELS).map(|_| gpu.context.new_event(None).map_err(cuda_error("create an event")));
    let marks = marks.collect::<Result<Vec<_>, _>>()?;
    let mut rounds = marks.iter().cycle();
    let launch = |mark: &cudarc::driver::CudaEvent| {
        spin.run(&stream, blocks, LONG_CYCLES)?;
        // SAFETY: the event and the stream exist.
        unsafe { result::event::record(mark.cu_event(), stream.raw()) }
            .map_err(cuda_error("record the end of a kernel"))
    };
    marks.iter().try_for_each(launch)?;
    writeln!(std::io::stdout(), "holding")?;
    std::io::stdout().flush()?;
    while !input.is_finished() {
        let oldest = rounds.next().expect("a cycle does not end");
        oldest.synchronize().map_err(cuda_error("finish a kernel"))?;
        launch(oldest)?;
    }
    Ok(spin.finish(&stream)?)
}

/// The spinning kernel, loaded into the driver.
struct SpinKernel {
    module: sys::CUmodule,
    function: sys::CUfunction,
}

impl SpinKernel {
    fn load(gpu: &CudaGpu) -> Result<Self, CudaError> {
        let failed = cuda_error("load a kernel");
        gpu.bind()?;
        let (mut module, mut function) = (null_mut(), null_mut());
        // SAFETY: the source ends with a NUL byte, and the driver fills in both handles.
        let loaded: Result<(), DriverError> = unsafe {
            sys::cuModuleLoadData(&mut module, SPIN.as_ptr().cast())
                .result()
                .and_then(|()| sys::cuModuleGetFunction(&mut function, module, c"spin".as_ptr()).result())
        };
        loaded.map_err(failed)?;
        Ok(Self { module, function })
    }

    fn run(&self, stream: &PartitionStream, blocks: u32, mut cycles: u64) -> Result<(), CudaError> {
        let mut arguments = [(&raw mut cycles).cast()];
        // SAFETY: the kernel takes one 64-bit number, which the driver reads before the call
        // returns.
        let launched = unsafe {
            result::launch_kernel(
                self.function,
                (blocks, 1, 1),
                (BLOCK_THREADS, 1, 1),
                0,
                stream.raw(),
                &mut arguments,
            )
        };
        launched.map_err(cuda_error("launch a kernel"))
    }

    fn finish(&self, stream: &PartitionStream) -> Result<(), CudaError> {
        // SAFETY: the stream exists.
        unsafe { result::stream::synchronize(stream.raw()) }.map_err(cuda_error("finish a kernel"))
    }
}

impl Drop for SpinKernel {
    fn drop(&mut self) {
        // SAFETY: this value owns the module, whose kernels have ended. If the call fails, the
        // module is freed when the process exits.
        unsafe { sys::cuModuleUnload(self.module) }.result().ok();
    }
}
