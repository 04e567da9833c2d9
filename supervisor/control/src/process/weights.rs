//! Weights on the GPU, kept for a model's next workers. The descriptors keep the memory, so that the
//! supervisor needs no CUDA; it is free again when they are closed and no worker maps it.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use shadowslice_shared::weights::{Content, MAX_REGIONS, Region, pair, receive, send};

/// The regions of a model's weights.
#[derive(Debug, Default)]
pub struct KeptWeights(BTreeMap<Content, OwnedFd>);

impl KeptWeights {
    /// A socket for a worker, which finds all regions in it: our end, and the worker's.
    pub fn offer(&self) -> io::Result<(OwnedFd, OwnedFd)> {
        let (ours, theirs) = pair()?;
        for (content, file) in &self.0 {
            send(&ours, content, file.as_fd())?;
        }
        Ok((ours, theirs))
    }

    /// Takes over the regions that a worker has made since it started.
    pub fn take(&mut self, socket: &OwnedFd) -> io::Result<()> {
        for _ in 0..MAX_REGIONS {
            let Some(Region { content, file }) = receive(socket)? else { break };
            // A region that was there could not be used any more.
            self.0.insert(content, file);
            if self.0.len() > MAX_REGIONS {
                self.0.pop_first();
            }
        }
        Ok(())
    }

    /// Bytes of the GPU's memory.
    pub fn bytes(&self) -> u64 {
        self.0.keys().map(|content| content.bytes).sum()
    }
}
