// The largest of a list of 32-bit keys, equal ones by place: a radix select by digits, from the top.
//
// The list is kept in four banks with a histogram each, so that it goes by four keys a cycle for each digit
// behind the first; and once, key by key, to say what is taken. Histograms are cleared and looked through
// for each digit: wide digits are for long lists.
`default_nettype none
module argtopk #(parameter LN = 16, parameter DIGIT = 8) (    // up to 2^LN keys; bits of a digit: 8 or 4
    input  wire        clk,
    input  wire        rst,
    input  wire        start,
    output wire        ready,                  // for keys
    input  wire        key_valid,
    input  wire [31:0] key,
    input  wire        load_end,               // pulse behind the last key
    input  wire [LN:0] keep,
    input  wire        emit,                   // level: say what is taken, as soon as it is known
    output reg         out_valid,              // in the order of the keys
    output reg         out_take,
    output reg         done                    // pulse behind the last
);
    localparam [2:0] IDLE = 0, CLEAR = 1, LOAD = 2, COUNT = 3, SCAN = 4, EMIT = 5;
    localparam LANES = 4;
    localparam BINS = 1 << DIGIT;
    localparam [2:0] TOP = 32 / DIGIT - 1;
    reg [2:0] state;
    reg [2:0] digit;
    reg [LN:0] count, place, need;
    reg [31:0] bound;
    reg [DIGIT:0] bin;
    reg [2:0] settle;
    reg scan_valid;
    reg [DIGIT-1:0] scan_bin;
    assign ready = state == LOAD;
    wire rows_left = {place, 2'd0} < {2'd0, count};
    wire emit_now = state == EMIT && emit && place != count;
    wire [LN:0] row = state == EMIT ? {2'd0, place[LN:2]} : place;
    reg counting, emitting;
    reg [1:0] emit_lane;
    wire [32*LANES-1:0] nows;
    wire [(LN+1)*LANES-1:0] founds;
    always @(posedge clk) begin
        counting <= state == COUNT && rows_left;
        emitting <= emit_now;
        emit_lane <= place[1:0];
        scan_valid <= state == SCAN && settle == 0;
        scan_bin <= bin[DIGIT-1:0];
    end

    // A counter is read, raised and written back; what is on the way goes first.
    genvar i;
    generate for (i = 0; i < LANES; i = i + 1) begin : lane
        reg [31:0] keys [0:(1<<(LN-2))-1];
        reg [LN:0] histogram [0:BINS-1];
        reg [31:0] now;
        reg inside_list;
        wire [DIGIT-1:0] now_digit = now[DIGIT*digit +: DIGIT];
        wire same = (now ^ bound) >> (DIGIT * (digit + 3'd1)) == 0;
        wire loaded = state == LOAD && key_valid && count[1:0] == i;
        wire raise = state == LOAD ? loaded : state == COUNT && counting && inside_list && same;
        wire [DIGIT-1:0] raise_bin = state == LOAD ? key[31 -: DIGIT] : now_digit;
        wire [DIGIT-1:0] read_bin = state == SCAN ? bin[DIGIT-1:0] : raise_bin;
        reg raised, written;
        reg [DIGIT-1:0] raised_bin, written_bin;
        reg [LN:0] found, written_count;
        wire [LN:0] old = written && written_bin == raised_bin ? written_count : found;
        wire [LN:0] new_count = old + 1'b1;
        always @(posedge clk) begin
            found <= raised && raised_bin == read_bin ? new_count
                   : written && written_bin == read_bin ? written_count : histogram[read_bin];
            raised <= raise && !rst;
            raised_bin <= raise_bin;
            written <= raised && !rst;
            written_bin <= raised_bin;
            written_count <= new_count;
            if (state == CLEAR) histogram[bin[DIGIT-1:0]] <= 0;
            else if (written) histogram[written_bin] <= written_count;
            if (loaded) keys[count[LN-1:2]] <= key;
            now <= keys[row[LN-3:0]];
            inside_list <= {place, 2'd0} + i < {2'd0, count};
        end
        assign nows[32*i +: 32] = now;
        assign founds[(LN+1)*i +: LN+1] = found;
    end endgenerate
    wire [LN:0] found = founds[0 +: LN+1] + founds[LN+1 +: LN+1] + founds[2*(LN+1) +: LN+1] + founds[3*(LN+1) +: LN+1];
    wire [31:0] now = nows[32*emit_lane +: 32];
    wire hit = state == SCAN && scan_valid && (found >= need || scan_bin == 0);
    always @(posedge clk) begin
        out_valid <= 0;
        done <= 0;
        if (rst) state <= IDLE;
        else case (state)
            IDLE: if (start) begin
                state <= CLEAR;
                digit <= TOP;
                bin <= 0;
                count <= 0;
            end
            CLEAR: begin
                bin <= bin + 1'b1;
                place <= 0;
                settle <= 5;
                if (bin == BINS - 1) begin
                    state <= digit == TOP ? LOAD : COUNT;
                end
            end
            LOAD: begin
                if (key_valid) count <= count + 1'b1;
                bin <= BINS - 1;
                need <= keep < count ? keep : count;
                if (load_end) state <= SCAN;
            end
            COUNT: begin
                bin <= BINS - 1;
                if (rows_left) place <= place + 1'b1;
                else if (!counting) state <= SCAN;
            end
            SCAN: begin
                if (settle != 0) settle <= settle - 3'd1;
                else bin <= bin - 1'b1;
                if (hit) begin
                    bound[DIGIT*digit +: DIGIT] <= scan_bin;
                    state <= digit == 0 ? EMIT : CLEAR;
                    digit <= digit - 3'd1;
                    bin <= 0;
                    place <= 0;
                end else if (scan_valid) need <= need - found;
            end
            EMIT: begin
                if (emit_now) place <= place + 1'b1;
                if (emitting) begin
                    out_valid <= 1;
                    out_take <= now > bound || (now == bound && need != 0);
                    if (now == bound && need != 0) need <= need - 1'b1;
                end else if (emit && place == count) begin   // of no key, too: who asks must hear the end
                    state <= IDLE;
                    done <= 1;
                end
            end
            default: state <= IDLE;
        endcase
    end
endmodule
`default_nettype wire
