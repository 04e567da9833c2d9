//! Certificates that are not valid, or expire soon.

use std::path::{Path, PathBuf};
use std::time::Duration;

use shadowslice_config::Tls;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, UnixTime};
use webpki::{EndEntityCert, Error, KeyUsage};

/// The time before a certificate's end at which warnings begin.
const NOTICE: Duration = Duration::from_hours(7 * 24);

/// The end of the year 9999, in s since 1970. Every certificate has expired at this time.
const FAR: Duration = Duration::from_secs(253_402_300_799);

/// A file with certificates of a listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateExpiry {
    pub file: PathBuf,
    /// The key in the configuration, which is `certificate` or `client_ca`.
    pub kind: &'static str,
    /// The time at which the first of the certificates expires, in s since 1970.
    pub expires: u64,
}

/// Returns when the certificates of a listener expire, according to their files.
pub(super) fn expiries(tls: &Tls) -> Vec<CertificateExpiry> {
    let of = |(file, kind): (&PathBuf, &'static str)| {
        let read = certificates(file).unwrap_or_default();
        let expires = read.iter().filter_map(expires).min()?;
        Some(CertificateExpiry { file: file.clone(), kind, expires })
    };
    let authority = tls.client_ca.as_ref().map(|file| (file, "client_ca"));
    [Some((&tls.certificate, "certificate")), authority].into_iter().flatten().filter_map(of).collect()
}

fn expires(certificate: &CertificateDer<'_>) -> Option<u64> {
    match outside_its_dates(certificate, UnixTime::since_unix_epoch(FAR)) {
        Some(Error::CertExpired { not_after, .. }) => Some(not_after.as_secs()),
        _ => None,
    }
}

/// Returns the faults in the dates of a listener's certificates. Ignores files that cannot be read,
/// because a start reports them.
pub fn expiry_warnings(tls: &Tls) -> Vec<String> {
    let now = UnixTime::now();
    let (certificate, authority) = (Some(&tls.certificate), tls.client_ca.as_ref());
    let server = certificate.map(|file| (file, "the certificate", "clients refuse it"));
    let clients = authority.map(|file| (file, "the client_ca", "the clients that it signed are refused"));
    let warnings = [server, clients].into_iter().flatten().flat_map(|(file, what, effect)| {
        let read = certificates(file).unwrap_or_default();
        read.into_iter().filter_map(move |read| warning(&read, now, (file, what, effect)))
    });
    warnings.collect()
}

fn warning(
    certificate: &CertificateDer<'_>,
    now: UnixTime,
    (file, what, effect): (&Path, &str, &str),
) -> Option<String> {
    let seconds = |time: UnixTime| Duration::from_secs(time.as_secs());
    let since = |later: UnixTime, earlier: UnixTime| shown(seconds(later).saturating_sub(seconds(earlier)));
    let what = format!("{what} in {}", file.display());
    match outside_its_dates(certificate, now) {
        Some(Error::CertExpired { not_after, .. }) => {
            let ago = since(now, not_after);
            return Some(format!("{what} expired {ago} ago, and {effect}; replace the file"));
        }
        Some(Error::CertNotValidYet { not_before, .. }) => {
            let left = since(not_before, now);
            return Some(format!("{what} becomes valid in {left}, and {effect} until then; check the clock"));
        }
        _ => {}
    }
    match outside_its_dates(certificate, UnixTime::since_unix_epoch(seconds(now) + NOTICE)) {
        Some(Error::CertExpired { not_after, .. }) => {
            Some(format!("{what} expires in {}; replace the file", since(not_after, now)))
        }
        _ => None,
    }
}

/// Returns the fault in the dates of a certificate. The verification checks the dates first, and
/// then fails in another way, because everything else is missing here.
fn outside_its_dates(certificate: &CertificateDer<'_>, time: UnixTime) -> Option<Error> {
    let certificate = EndEntityCert::try_from(certificate).ok()?;
    certificate.verify_for_usage(&[], &[], &[], time, KeyUsage::server_auth(), None, None).err()
}

fn shown(duration: Duration) -> String {
    let minutes = duration.as_secs() / 60;
    match minutes {
        0..60 => format!("{minutes} minutes"),
        60..2880 => format!("{} hours", minutes / 60),
        _ => format!("{} days", minutes / 1440),
    }
}

/// Returns the certificates in a file. Fails if there are none.
pub(super) fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, pem::Error> {
    let found: Vec<_> = CertificateDer::pem_file_iter(file)?.collect::<Result<_, _>>()?;
    if found.is_empty() { Err(pem::Error::NoItemsFound) } else { Ok(found) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_shown_in_the_unit_that_matters() {
        let shown = [59, 3540, 7200, 172_799, 172_800].map(|seconds| shown(Duration::from_secs(seconds)));
        assert_eq!(shown, ["0 minutes", "59 minutes", "2 hours", "47 hours", "2 days"]);
    }

    #[test]
    fn files_that_cannot_be_read_have_no_dates() {
        let file = Path::new("/nowhere/server.pem").to_owned();
        let tls = Tls { certificate: file.clone(), key: file.clone(), client_ca: Some(file) };
        assert!(expiry_warnings(&tls).is_empty());
    }
}
