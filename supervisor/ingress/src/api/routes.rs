//! The paths of HTTP requests.

use hyper::Method;
use percent_encoding::percent_decode_str;

use super::unsupported;

/// The maximum number of segments after `/v2`. No endpoint has more.
const MAX_SEGMENTS: usize = 5;

const SYSTEM_MEMORY: &str = "systemsharedmemory";
const CUDA_MEMORY: &str = "cudasharedmemory";

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Endpoint {
    Live,
    Ready,
    Server,
    Statistics,
    Repository(RepositoryEndpoint),
    Model {
        name: String,
        version: String,
        endpoint: ModelEndpoint,
    },
    /// A region of shared memory. An empty name means all regions.
    Memory {
        is_cuda: bool,
        name: String,
        endpoint: MemoryEndpoint,
    },
    /// An extension that is not supported.
    Unsupported(&'static str),
}

/// An endpoint of the repository. Models are given by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RepositoryEndpoint {
    Index,
    Load(String),
    Unload(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MemoryEndpoint {
    Status,
    Register,
    Unregister,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ModelEndpoint {
    Metadata,
    Ready,
    Config,
    Statistics,
    Infer,
}

impl Endpoint {
    /// Parses a path. Names are percent-decoded after the path is split, so they may contain
    /// slashes.
    pub(super) fn parse(path: &str) -> Option<Self> {
        let mut segments = [""; MAX_SEGMENTS];
        let mut count = 0;
        for segment in path.strip_prefix("/v2")?.split('/').skip(1) {
            *segments.get_mut(count)? = segment;
            count += 1;
        }
        let (model, version, endpoint) = match segments[..count] {
            [] if path == "/v2" => return Some(Self::Server),
            [""] => return Some(Self::Server),
            ["health", "live"] => return Some(Self::Live),
            ["health", "ready"] => return Some(Self::Ready),
            [kind @ (SYSTEM_MEMORY | CUDA_MEMORY), endpoint] => return Self::memory(kind, "", endpoint),
            [kind @ (SYSTEM_MEMORY | CUDA_MEMORY), "region", name, endpoint] => {
                return Self::memory(kind, name, endpoint);
            }
            ["trace", "setting"] | ["models", _, "trace", "setting"] => {
                return Some(Self::Unsupported(unsupported::TRACING));
            }
            ["logging"] => return Some(Self::Unsupported(unsupported::LOGGING)),
            ["models", "stats"] => return Some(Self::Statistics),
            ["repository", "index"] => return Some(Self::Repository(RepositoryEndpoint::Index)),
            ["repository", "models", model, "load"] => {
                return Some(Self::Repository(RepositoryEndpoint::Load(decode(model)?)));
            }
            ["repository", "models", model, "unload"] => {
                return Some(Self::Repository(RepositoryEndpoint::Unload(decode(model)?)));
            }
            ["models", model] => (model, "", ""),
            ["models", model, "versions", version] => (model, version, ""),
            ["models", model, endpoint] => (model, "", endpoint),
            ["models", model, "versions", version, endpoint] => (model, version, endpoint),
            _ => return None,
        };
        let endpoint = match endpoint {
            "" => ModelEndpoint::Metadata,
            "ready" => ModelEndpoint::Ready,
            "config" => ModelEndpoint::Config,
            "stats" => ModelEndpoint::Statistics,
            "infer" => ModelEndpoint::Infer,
            _ => return None,
        };
        Some(Self::Model { name: decode(model)?, version: decode(version)?, endpoint })
    }

    fn memory(kind: &str, name: &str, endpoint: &str) -> Option<Self> {
        let endpoint = match endpoint {
            "status" => MemoryEndpoint::Status,
            "unregister" => MemoryEndpoint::Unregister,
            "register" if !name.is_empty() => MemoryEndpoint::Register,
            _ => return None,
        };
        Some(Self::Memory { is_cuda: kind == CUDA_MEMORY, name: decode(name)?, endpoint })
    }

    pub(super) fn method(&self) -> Method {
        match self {
            Self::Memory { endpoint: MemoryEndpoint::Register | MemoryEndpoint::Unregister, .. } => {
                Method::POST
            }
            Self::Model { endpoint: ModelEndpoint::Infer, .. } | Self::Repository(_) => Method::POST,
            _ => Method::GET,
        }
    }

    /// Returns whether the endpoint accepts a method. HEAD is answered like GET, and hyper omits
    /// the body. An unsupported extension is refused for every method.
    pub(super) fn accepts(&self, method: &Method) -> bool {
        let method = if *method == Method::HEAD { &Method::GET } else { method };
        matches!(self, Self::Unsupported(_)) || *method == self.method()
    }
}

fn decode(segment: &str) -> Option<String> {
    percent_decode_str(segment).decode_utf8().ok().map(String::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(name: &str, version: &str, endpoint: ModelEndpoint) -> Option<Endpoint> {
        Some(Endpoint::Model { name: name.into(), version: version.into(), endpoint })
    }

    #[test]
    fn paths_name_the_endpoints_of_the_protocol() {
        assert_eq!(Endpoint::parse("/v2"), Some(Endpoint::Server));
        assert_eq!(Endpoint::parse("/v2/health/live"), Some(Endpoint::Live));
        assert_eq!(Endpoint::parse("/v2/health/ready"), Some(Endpoint::Ready));
        assert_eq!(Endpoint::parse("/v2/models/m"), model("m", "", ModelEndpoint::Metadata));
        assert_eq!(Endpoint::parse("/v2/models/m/versions/1"), model("m", "1", ModelEndpoint::Metadata));
        assert_eq!(Endpoint::parse("/v2/models/m/config"), model("m", "", ModelEndpoint::Config));
        assert_eq!(Endpoint::parse("/v2/models/stats"), Some(Endpoint::Statistics));
        assert_eq!(
            Endpoint::parse("/v2/models/m/versions/1/stats"),
            model("m", "1", ModelEndpoint::Statistics)
        );
        assert_eq!(Endpoint::parse("/v2/models/m/versions/1/infer"), model("m", "1", ModelEndpoint::Infer));
        let load = RepositoryEndpoint::Load("m".into());
        assert_eq!(Endpoint::parse("/v2/repository/models/m/load"), Some(Endpoint::Repository(load)));
        assert_eq!(
            Endpoint::parse("/v2/models/a%2Fb%20%C3%A9/ready"),
            model("a/b é", "", ModelEndpoint::Ready)
        );
        let memory =
            |is_cuda, name: &str, endpoint| Some(Endpoint::Memory { is_cuda, name: name.into(), endpoint });
        let path = "/v2/systemsharedmemory/region/a%2Fb/register";
        assert_eq!(Endpoint::parse(path), memory(false, "a/b", MemoryEndpoint::Register));
        assert_eq!(Endpoint::parse("/v2/cudasharedmemory/status"), memory(true, "", MemoryEndpoint::Status));
    }

    #[test]
    fn other_paths_name_no_endpoint() {
        for path in ["/", "", "/v1", "/v2x", "/v2/models", "/v2/models/m/versions", "/v2/models/m/x", "/v2/a"]
        {
            assert_eq!(Endpoint::parse(path), None, "{path}");
        }
        assert_eq!(Endpoint::parse("/v2/models/%FF/infer"), None);
    }
}
