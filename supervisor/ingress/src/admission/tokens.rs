//! The tokens of clients that send requests over TCP.
//!
//! The file contains only hashes, so nobody who reads it can send requests. Tokens are random, so
//! they need no slow hash.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;
use sha2::{Digest, Sha256};
use shadowslice_datapath::peer::{Guard, Refusals};

use super::bind_error::BindError;
use super::reloading_file::ReloadingFile;
use super::request_error::RequestError;

/// The maximum size of a token file, in bytes. A thousand tokens take 100 kB.
const MAX_FILE_BYTES: u64 = 1 << 20;

const SCHEME: &str = "bearer ";

type Hash = [u8; 32];

#[derive(Debug, Clone)]
pub(crate) struct Tokens {
    names: Arc<ReloadingFile<HashMap<Hash, String>>>,
    /// The guard that counts refused requests.
    guard: Arc<Guard>,
}

impl Tokens {
    pub(crate) fn read(file: &Path, refusals: &Arc<Refusals>) -> Result<Self, BindError> {
        let path = file.to_owned();
        let names = ReloadingFile::read(vec![file.to_owned()], move || read(&path))?;
        Ok(Self { names, guard: Arc::new(Guard::refusing(refusals)) })
    }

    pub(super) fn guard(&self) -> &Guard {
        &self.guard
    }

    /// Returns the name of the client whose token a request contains.
    pub(super) fn name(&self, headers: &HeaderMap) -> Result<String, RequestError> {
        let refused = |why: &str| Err(RequestError::Unauthenticated(why.to_owned()));
        let Some(given) = headers.get(AUTHORIZATION) else {
            return refused("this address requires a token; send `Authorization: Bearer TOKEN`");
        };
        let token = given.as_bytes().split_at_checked(SCHEME.len());
        let token = token.filter(|(scheme, _)| scheme.eq_ignore_ascii_case(SCHEME.as_bytes()));
        let name = token.and_then(|(_, token)| {
            let hash: Hash = Sha256::digest(token.trim_ascii()).into();
            self.names.current().get(&hash).cloned()
        });
        name.map_or_else(|| refused("unknown token"), Ok)
    }
}

fn read(file: &Path) -> Result<HashMap<Hash, String>, BindError> {
    let shown = file.display();
    let failed = |source| BindError::new(format!("cannot read the tokens in {shown}"), Some(source));
    let size = fs::metadata(file).map_err(failed)?.len();
    if size > MAX_FILE_BYTES {
        return Err(BindError::new(
            format!("{shown} has {size} bytes; a file of tokens may have at most {MAX_FILE_BYTES}"),
            None,
        ));
    }
    parse(&fs::read_to_string(file).map_err(failed)?)
        .map_err(|(line, why)| BindError::new(format!("{shown}:{line}: {why}"), None))
}

/// Parses a token file. An error contains the number of a line, and the fault of that line.
fn parse(text: &str) -> Result<HashMap<Hash, String>, (usize, &'static str)> {
    let mut names = HashMap::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (name, hash) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let why = "give a name and the SHA-256 of its token, as `printf %s \"$TOKEN\" | sha256sum` prints it";
        let hash = parse_hash(hash.trim()).ok_or((index + 1, why))?;
        if names.insert(hash, name.to_owned()).is_some() {
            return Err((index + 1, "this token already has a name; give each client its own token"));
        }
    }
    if names.is_empty() {
        return Err((
            1,
            "the file has no tokens, so the server would refuse every client; add one token per line",
        ));
    }
    Ok(names)
}

/// Parses 64 hexadecimal digits. Ignores what follows, because sha256sum adds the name of its
/// input.
fn parse_hash(text: &str) -> Option<Hash> {
    let digits = text.split_whitespace().next().filter(|digits| digits.len() == 64 && digits.is_ascii())?;
    let mut hash = Hash::default();
    for (byte, at) in hash.iter_mut().zip((0..).step_by(2)) {
        let pair = &digits[at..at + 2];
        *byte = u8::from_str_radix(pair, 16).ok().filter(|_| !pair.starts_with('+'))?;
    }
    Some(hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The hash of "secret".
    const HASH: &str = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";

    #[test]
    fn lines_name_hashes() {
        let names = parse(&format!("# ours\n\nci {HASH}  -\n")).unwrap();
        let hash: Hash = Sha256::digest("secret").into();
        assert_eq!(names, HashMap::from([(hash, "ci".to_owned())]));
    }

    #[test]
    fn faulty_lines_are_reported_by_their_number() {
        for bad in ["ci secret", "ci", HASH, &format!("ci +{}", &HASH[1..]), &format!("ci {HASH}0")] {
            assert_eq!(parse(&format!("# ours\n{bad}")).unwrap_err().0, 2, "{bad}");
        }
        assert_eq!(parse(&format!("a {HASH}\nb {HASH}")).unwrap_err().0, 2, "two names");
        assert!(parse("# nobody\n").is_err());
    }
}
