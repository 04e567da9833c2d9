//! The weights on the GPU that the supervisor keeps for a model's next workers. Open descriptors
//! keep the memory allocated, so the supervisor does not need CUDA. The memory is freed when the
//! descriptors are closed and no worker maps it.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use shadowslice_shared::weights::{MAX_REGIONS, RegionContent, WeightRegion, receive, send, socket_pair};

#[derive(Debug, Default)]
pub struct KeptWeights(BTreeMap<RegionContent, OwnedFd>);

impl KeptWeights {
    /// Returns the supervisor's end and the worker's end of a socket that contains all regions.
    pub fn offer(&self) -> io::Result<(OwnedFd, OwnedFd)> {
        let (ours, theirs) = socket_pair()?;
        for (content, file) in &self.0 {
            send(&ours, content, file.as_fd())?;
        }
        Ok((ours, theirs))
    }

    /// Keeps the regions that a worker has allocated since its start.
    pub fn take(&mut self, socket: &OwnedFd) -> io::Result<()> {
        for _ in 0..MAX_REGIONS {
            let Some(WeightRegion { content, file }) = receive(socket)? else { break };
            // The worker allocated this region because it could not use a kept one.
            self.0.insert(content, file);
            if self.0.len() > MAX_REGIONS {
                self.0.pop_first();
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use nix::sys::socket::{MsgFlags, send as send_bytes};

    use super::*;

    fn content(number: u8) -> RegionContent {
        RegionContent { fingerprint: [number; 32], bytes: u64::from(number) }
    }

    fn file() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    #[test]
    fn what_one_worker_has_made_the_next_one_finds() {
        let mut kept = KeptWeights::default();
        let (ours, theirs) = kept.offer().unwrap();
        assert!(receive(&theirs).unwrap().is_none(), "the first worker finds none");
        for number in [1, 2, 1] {
            send(&theirs, &content(number), file().as_fd()).unwrap();
        }
        kept.take(&ours).unwrap();
        let (_ours, next) = kept.offer().unwrap();
        let found: Vec<_> =
            std::iter::from_fn(|| receive(&next).unwrap()).map(|region| region.content).collect();
        assert_eq!(found, [content(1), content(2)]);
    }

    #[test]
    fn a_worker_cannot_have_any_number_of_regions_kept() {
        let mut kept = KeptWeights::default();
        for number in 0..40 {
            let (ours, theirs) = socket_pair().unwrap();
            send(&theirs, &content(number), file().as_fd()).unwrap();
            kept.take(&ours).unwrap();
        }
        assert_eq!(kept.0.len(), MAX_REGIONS);
        let (ours, theirs) = socket_pair().unwrap();
        send_bytes(theirs.as_raw_fd(), b"no region", MsgFlags::empty()).unwrap();
        assert!(kept.take(&ours).is_err());
    }
}
