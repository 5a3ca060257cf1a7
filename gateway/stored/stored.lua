-- Responses that are kept for one tenant.
--
-- KEYS  1 order   sorted set: id -> when it was used last, in us
--       2 sizes   hash: id -> bytes; '' -> the bytes of all
-- ARGV  1 the operation; the rest is its arguments
--
-- A response is a hash beside them, `order:id`, which no caller can name among the keys: who is on a
-- conversation's line is known here alone. They have one hash tag, so they are where these are. Each of them
-- expires by itself; what the other two say of it goes with the next put, and with the last of them.
--
-- A reply begins with the server's time in ms.

local DROPPED_MAX = 256  -- expired ones that one put takes out of the books
local ORDER, SIZES = KEYS[1], KEYS[2]

local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now_ms = math.floor(now_us / 1000)

local function place(id) return ORDER .. ':' .. id end

local function drop(id)
  local size = redis.call('HGET', SIZES, id)
  redis.call('ZREM', ORDER, id)
  if size then
    redis.call('HDEL', SIZES, id)
    redis.call('HINCRBY', SIZES, '', -size)
  end
  return redis.call('UNLINK', place(id))
end

-- put TTL_MS LEN_MAX SIZE LINKS_MAX ID PREVIOUS HEAD OUTPUT ITEMS LAST_NUMBER
local function put(ttl_ms, len_max, size, links_max, id, previous, head, output, items, last_number)
  ttl_ms, len_max = tonumber(ttl_ms), tonumber(len_max)
  local expired = redis.call('ZRANGEBYSCORE', ORDER, '-inf', now_us - 1000 * ttl_ms, 'LIMIT', 0, DROPPED_MAX)
  for _, old in ipairs(expired) do drop(old) end
  drop(id)
  redis.call('HSET', place(id), 'previous', previous, 'head', head, 'output', output, 'items', items,
    'last_number', last_number)
  redis.call('PEXPIRE', place(id), ttl_ms)
  redis.call('HSET', SIZES, id, size)
  local held = redis.call('HINCRBY', SIZES, '', size)
  local before, links = previous, 0
  while before ~= '' and links < tonumber(links_max) do
    local following = redis.call('HGET', place(before), 'previous')
    if not following then break end
    redis.call('PEXPIRE', place(before), ttl_ms)
    redis.call('ZADD', ORDER, now_us, before)
    before, links = following, links + 1
  end
  redis.call('ZADD', ORDER, now_us + 1, id)  -- behind those that it goes on with
  local evicted = 0
  while held > len_max do
    local oldest = redis.call('ZRANGE', ORDER, 0, 0)[1]
    if not oldest or oldest == id then break end
    evicted = evicted + drop(oldest)
    held = tonumber(redis.call('HGET', SIZES, '')) or 0
  end
  for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ttl_ms) end
  return {now_ms, evicted}
end

-- get ID
local function get(id)
  local found = redis.call('HMGET', place(id), 'previous', 'head', 'output', 'items', 'last_number')
  return found[1] and {now_ms, unpack(found)} or {now_ms}
end

-- turns LEN ID: the latest turns of the conversation that ends with a response, some bytes of them. Then the id
-- where it goes on, and whether there is none of it.
local function turns(length, id)
  local reply, left = {now_ms, '', 0}, tonumber(length)
  while id ~= '' and left > 0 do
    local found = redis.call('HMGET', place(id), 'previous', 'items', 'output')
    if not found[1] then
      reply[3] = 1
      break
    end
    for _, word in ipairs({id, found[2], found[3]}) do reply[#reply + 1] = word end
    id, left = found[1], left - #found[2] - #found[3] - 1
  end
  reply[2] = id
  return reply
end

-- forget COUNT: delete so many at most.
local function forget(count)
  local ids = redis.call('ZRANGE', ORDER, 0, count - 1)
  local gone = 0
  for _, id in ipairs(ids) do gone = gone + drop(id) end
  return {now_ms, gone, #ids}
end

local OPERATIONS = {
  probe = function() return {now_ms} end,
  put = put,
  get = get,
  turns = turns,
  delete = function(id) return {now_ms, drop(id)} end,
  forget = forget,
}
return OPERATIONS[ARGV[1]](unpack(ARGV, 2))
